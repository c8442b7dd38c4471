"""Where the lines of a job's log come from: its pod, the last ones that were kept, or its volume."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from typer.testing import CliRunner

from lockstep.api.errors import Failed
from lockstep.cli.jobs import logs as cli_logs
from lockstep.cli.main import app
from lockstep.kube import exec as kube_exec
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.kube.exec import NotRunning, PodPlace
from lockstep.plan.pages.logs import LogSelection, nodes_of
from lockstep.platforms.files.reader import NoReader
from lockstep.platforms.jobs import logs as module
from lockstep.platforms.jobs import runs
from lockstep.platforms.jobs.logs import follow, lines, unheard_lines
from lockstep.platforms.jobs.processes import LocalPlace
from lockstep.platforms.jobs.runs import frozen_run
from lockstep.platforms.kubernetes.job import KubernetesJob
from lockstep.programs import NotStarted
from lockstep_gang.contract.run import JobIdentity
from support.fake_cluster import FakeCluster
from unit.gang.cases import make_run
from unit.platforms.files.test_reader import claim, starts, stateful_set
from unit.platforms.inpod.test_runfolder import write
from unit.virtual_time import VirtualClock, clock_of

Object = dict[str, Any]
JOB: Object = {"kind": "TrainingJob", "metadata": {"name": "x", "namespace": "ns", "uid": "uid-2"}, "spec": {"nodes": 2}, "status": {}}
ALL = LogSelection()
PRINTED = ["[lockstep] attempt 1 starts", "[rank 0] a", "[rank 1] b", "[rank 0] c"]


class Logged(FakeCluster):
    """An API server whose pods have printed lines, one a second; `streams`: what each further request brings."""

    def __init__(self, *objects: Object, streams: list[list[str]] | None = None) -> None:
        super().__init__(*objects)
        self.streams = streams or []
        self.queries: list[Mapping[str, str]] = []
        self.refusal: ApiError | None = None

    async def log(self, namespace: str, pod: str, container: str, query: Mapping[str, str]) -> AsyncIterator[str]:
        self.queries.append(query)
        if self.refusal is not None:
            raise self.refusal
        yield "failed to try resolving symlinks"  # the kubelet's own words have no time
        for line in self.streams.pop(0) if self.streams else []:
            yield line


def stamped(*texts: str, first: int = 0) -> list[str]:
    return [f"2026-01-01T00:00:{first + number:02}.5Z {text}" for number, text in enumerate(texts)]


def pod(name: str, began: str = "2026-01-01T00:00:00Z", restarts: int = 0) -> Object:
    state = {"running": {"startedAt": began}}
    return {
        "kind": "Pod",
        "metadata": {"name": name},
        "status": {"containerStatuses": [{"name": "trainer", "state": state, "restartCount": restarts}]},
    }


def kept(*texts: str) -> Object:
    return {"kind": "ConfigMap", "metadata": {"name": "x-log"}, "data": {"node-0.log": "\n".join(texts) + "\n"}}


def read(cluster: FakeCluster, wanted: LogSelection = ALL, job: Object = JOB, said: list[str] | None = None) -> list[str]:
    async def collect() -> list[str]:
        return [line async for line in lines(cluster.as_cluster, job, wanted, (said if said is not None else []).append)]

    return asyncio.run(collect())


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The job's volume is a folder here, shown by a reader; what is asked of it is really read."""
    from lockstep.platforms.inpod import runfolder

    @asynccontextmanager
    async def beside(cluster: Cluster, namespace: str, job: str, node: int = 0, **_: Any) -> AsyncIterator[PodPlace]:
        yield PodPlace(cluster, namespace, f"{job}-reader", "reader")

    async def folder_lines(place: PodPlace, folder: str, **request: Any) -> AsyncIterator[str]:
        for line in runfolder.log(root=str(tmp_path), **request):
            yield line

    monkeypatch.setattr(module, "beside", beside)
    monkeypatch.setattr(module, "folder_lines", folder_lines)
    write(tmp_path, "uid-1", (1, "[rank 0] of an earlier job"))
    write(tmp_path, "uid-2", (2, "[rank 0] first"), (3, "[rank 1] second"))
    return tmp_path


def test_the_log_of_a_pod_is_its_own_lines_without_the_kubelet_s() -> None:
    assert read(Logged(pod("x-0"), streams=[stamped(*PRINTED)])) == PRINTED


@pytest.mark.parametrize("is_there", [True, False], ids=["it is going", "it is gone"])
def test_a_pod_that_goes_away_while_its_log_is_asked_for_leaves_it_on_the_volume(is_there: bool, volume: Path) -> None:
    """As right after the end of a job: the pod is seen, and its container's log is gone a moment later."""

    class Going(Logged):
        async def log(self, namespace: str, pod: str, container: str, query: Mapping[str, str]) -> AsyncIterator[str]:
            async for line in super().log(namespace, pod, container, query):
                yield line
            if is_there:
                self.objects["Pod", "x-0"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:01:00Z"
            else:
                del self.objects["Pod", "x-0"]
            raise ApiError(404, "NotFound", 'container "trainer" in pod "x-0" not found')

    assert read(Going(pod("x-0"))) == ["[rank 0] first", "[rank 1] second"]
    assert read(Logged(pod("x-0"))) == [], "a pod that stays has printed nothing yet"


def test_a_rank_s_last_lines_are_counted_after_those_of_others_were_left_out() -> None:
    cluster = Logged(pod("x-0"), streams=[stamped(*PRINTED)])
    assert read(cluster, LogSelection(rank=0, tail=1)) == ["[rank 0] c"]
    assert "tailLines" not in cluster.queries[0]
    cluster = Logged(pod("x-0"), streams=[stamped(*PRINTED)])
    read(cluster, LogSelection(tail=3, since_seconds=60))
    assert (cluster.queries[0]["tailLines"], cluster.queries[0]["sinceSeconds"]) == ("3", "60")


def test_without_the_right_to_read_logs_it_says_so_at_once_also_when_following() -> None:
    cluster = Logged(pod("x-0"))
    cluster.refusal = ApiError(403, "Forbidden", "pods is forbidden")
    with pytest.raises(Failed, match="pods is forbidden; it needs `get` on pods/log"):
        read(cluster)
    with pytest.raises(Failed, match="pods/log"):
        asyncio.run(followed(cluster, ended_after(9)))


def ended_after(looks: int) -> Callable[[], Awaitable[bool]]:
    left = [looks]

    async def over() -> bool:
        left[0] -= 1
        return left[0] < 0

    return over


async def followed(cluster: FakeCluster, over: Callable[[], Awaitable[bool]], wanted: LogSelection = ALL) -> list[str]:
    return [line async for line in follow(cluster.as_cluster, "ns", "x", wanted, over)]


class AwayPlace(LocalPlace):
    """This machine, which can't be reached at some of the looks."""

    looks: ClassVar[list[bool]] = []

    @asynccontextmanager
    async def program(self, *words: Any, **options: Any) -> AsyncIterator[Any]:
        if not self.looks.pop(0):
            raise NotStarted("host lab0 can't be reached")
        async with super().program(*words, **options) as running:
            yield running


@pytest.mark.parametrize(("tail", "shown"), [(-1, ["a", "b", "c", "d"]), (1, ["b", "c", "d"]), (0, ["c", "d"])])
def test_a_folder_s_log_is_followed_over_looks_that_fail_and_no_line_comes_twice(
    tail: int, shown: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "POLL_SECONDS", 0)
    monkeypatch.setattr(AwayPlace, "looks", [False, True, False, False, True, True])
    grows = iter([["[rank 0] a", "[rank 0] b"], [], [], ["[rank 0] c"], [], ["[rank 0] d"]])
    left = [6]

    async def over() -> bool:
        write(tmp_path, "uid-2", *((1, line) for line in next(grows)))
        left[0] -= 1
        return not left[0]

    async def follow_it() -> list[str]:
        request = {"uid": "uid-2", "node": 0, "tail": tail}
        async with aclosing(runs.followed(AwayPlace(), str(tmp_path), request, over)) as output:
            return [line async for line in output]

    assert [line.removeprefix("[rank 0] ") for line in asyncio.run(follow_it())] == shown
    told = "lockstep: host lab0 can't be reached: the output goes on when it answers again\n"
    assert capsys.readouterr().err == told * 2, "once for each time that it is away"


def test_a_log_that_ends_is_asked_for_twice_a_second_and_a_folder_s_every_second(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def follow_a_folder() -> None:
        async with aclosing(runs.followed(AwayPlace(), str(tmp_path), {"tail": -1}, ended_after(4))) as output:
            assert [line async for line in output] == []

    monkeypatch.setattr(AwayPlace, "looks", [False] * 5)
    assert VirtualClock().seconds_of(followed(Logged(pod("x-0")), ended_after(4))) == pytest.approx(2.0)
    assert VirtualClock().seconds_of(follow_a_folder()) == pytest.approx(4.0)


def test_whom_an_agent_can_t_reach_is_looked_for_in_its_last_thousand_lines() -> None:
    cluster = Logged()
    assert asyncio.run(module.unheard_lines(cluster.as_cluster, "ns", [pod("x-0")])) == []
    assert cluster.queries == [{"tailLines": "1000"}]


def test_a_stream_that_breaks_is_taken_up_again_and_no_line_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0)
    cluster = Logged(pod("x-0"), streams=[stamped("a", "b"), stamped("a", "b", "c"), stamped("a", "b", "c")])
    assert asyncio.run(followed(cluster, ended_after(2))) == ["a", "b", "c"]
    assert cluster.queries[1]["sinceTime"] == "2026-01-01T00:00:01Z"


def test_what_a_container_wrote_last_before_it_was_restarted_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0)
    cluster = Logged(pod("x-0"), streams=[stamped("a"), stamped("a", "the end"), stamped("anew", first=20)])
    over = ended_after(1)

    async def restarted() -> bool:
        cluster.objects["Pod", "x-0"] = pod("x-0", restarts=1)
        return await over()

    assert asyncio.run(followed(cluster, restarted)) == ["a", "the end", "anew"]
    assert cluster.queries[1]["previous"] == "true"


@pytest.mark.parametrize(("restarts", "query"), [(0, {}), (1, {"previous": "true"})])
def test_the_rest_of_a_log_that_broke_off_is_read_when_the_job_has_ended(restarts: int, query: Object) -> None:
    class Breaking(Logged):
        async def log(self, *where: Any) -> AsyncIterator[str]:
            async for line in super().log(*where):
                yield line
            if len(self.queries) == 1:
                self.objects["Pod", "x-0"] = pod("x-0", restarts=restarts)
                raise ConnectionResetError

    cluster = Breaking(pod("x-0"), streams=[stamped("a"), stamped("a", "the end")])
    assert asyncio.run(followed(cluster, ended_after(0))) == ["a", "the end"]
    assert cluster.queries[1].items() >= query.items() and "follow" not in cluster.queries[1]


def test_of_a_job_that_has_ended_few_last_lines_come_from_those_that_were_kept() -> None:
    assert read(Logged(kept("a", "b", "c")), LogSelection(tail=2)) == ["b", "c"]


def test_all_its_lines_or_those_of_a_rank_come_from_its_volume(volume: Path) -> None:
    assert read(Logged(kept("a"))) == ["[rank 0] first", "[rank 1] second"]
    assert read(Logged(kept("a")), LogSelection(rank=1, tail=1)) == ["[rank 1] second"]
    assert read(Logged(), LogSelection(tail=1)) == ["[rank 1] second"]


def test_an_attempt_comes_from_the_volume_while_the_pod_runs_too(volume: Path) -> None:
    assert read(Logged(pod("x-0"), streams=[stamped(*PRINTED)]), LogSelection(attempt=2)) == ["[rank 0] first"]


def test_a_pod_that_began_after_a_failure_lacks_what_was_before_and_the_volume_does_not(volume: Path) -> None:
    job = replace_status(restartHistory=[{"time": "2026-01-01T00:00:05Z"}])
    assert read(Logged(pod("x-0", began="2026-01-01T00:00:09Z"), streams=[stamped("new")]), job=job) == [
        "[rank 0] first",
        "[rank 1] second",
    ]
    assert read(Logged(pod("x-0"), streams=[stamped("all")]), job=job) == ["all"]


def test_the_log_of_a_run_without_operator_is_whole_though_its_containers_were_started_again(volume: Path) -> None:
    run: Object = {**JOB, "kind": "ConfigMap", "spec": {}}
    assert read(Logged(pod("x-0"), streams=[stamped("first start")]), job=run) == ["first start"]
    assert read(Logged(pod("x-0", restarts=1), streams=[stamped("again")]), job=run) == ["[rank 0] first", "[rank 1] second"]
    assert read(Logged(), job=run) == ["[rank 0] first", "[rank 1] second"]


@pytest.mark.parametrize(
    ("replicas", "state", "ended"),
    [
        (0, {"running": {}}, True),
        (None, {"running": {}}, True),
        (2, {"running": {}}, False),
        (2, {"terminated": {"exitCode": 0}}, True),
        (2, {"terminated": {"exitCode": 137}}, False),
    ],
)
def test_a_run_without_operator_is_followed_to_its_end(replicas: int | None, state: Object, ended: bool) -> None:
    stateful_set = {"kind": "StatefulSet", "metadata": {"name": "x"}, "spec": {"replicas": replicas}}
    node = {"kind": "Pod", "metadata": {"name": "x-0"}, "status": {"containerStatuses": [{"name": "trainer", "state": state}]}}
    objects = [node] if replicas is None else [node, stateful_set]
    assert asyncio.run(module.has_run_ended(FakeCluster(*objects).as_cluster, "ns", "x")) is ended


def replace_status(**status: Any) -> Object:
    return {**JOB, "status": status}


def test_where_the_volume_cannot_be_read_the_last_lines_are_better_than_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise NoReader("a pod that shows the job's files was refused")

    monkeypatch.setattr(module, "beside", refused)
    said: list[str] = []
    assert read(Logged(kept("[rank 0] a", "[rank 1] b")), LogSelection(rank=1), said=said) == ["[rank 1] b"]
    assert "only the last lines of node 0" in said[0] and "was refused" in said[0]
    with pytest.raises(Failed, match="was refused"):
        read(Logged())


@pytest.mark.parametrize(("gone", "seconds"), [(1, 0.5), (59, 29.5), (1000, 30.0)])
def test_a_container_that_ends_between_the_look_and_the_program_is_looked_at_again_for_half_a_minute(
    gone: int, seconds: float, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gone`: how many looks find none, though the pod's status says that it runs."""
    clock, looks, read_folder = clock_of(monkeypatch, module, kube_exec), iter(range(gone)), module.folder_lines

    async def folder_lines(*where: Any, **request: Any) -> AsyncIterator[str]:
        if next(looks, None) is not None:
            raise NotRunning("the container of pod x-0 has ended")
        async for line in read_folder(*where, **request):
            yield line

    async def read_all() -> list[str]:
        return [line async for line in lines(Logged().as_cluster, JOB, ALL, print)]

    monkeypatch.setattr(module, "folder_lines", folder_lines)
    before = clock.now
    if seconds < kube_exec.AGAIN_SECONDS:
        assert clock.run(read_all()) == ["[rank 0] first", "[rank 1] second"]
    else:
        with pytest.raises(Failed, match=r"^job x: the container of pod x-0 has ended$"):
            clock.run(read_all())
    assert clock.now - before == pytest.approx(seconds)


def test_an_attempt_that_nobody_has_written_is_told(volume: Path) -> None:
    with pytest.raises(Failed, match="no log of node 0 and attempt 9"):
        read(Logged(kept("a")), LogSelection(attempt=9))


def test_the_run_that_was_frozen_says_how_many_nodes_an_ended_job_had() -> None:
    run = {"kind": "ConfigMap", "metadata": {"name": "x-run-1"}, "data": {"run.json": '{"nodes": 3}'}}
    job = {**JOB, "spec": {}, "status": {"nodes": 0, "run": {"name": "x-run-1"}}}
    assert nodes_of(job) == 0
    assert asyncio.run(frozen_run(FakeCluster(run).as_cluster, job)) == {"nodes": 3}
    assert asyncio.run(frozen_run(FakeCluster().as_cluster, job)) == {} == asyncio.run(frozen_run(FakeCluster(run).as_cluster, JOB))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rank", "1", "--node", "0"], "either --rank or --node"),
        (["--previous", "--attempt", "1"], "either --previous or --attempt"),
        (["-f", "--errors"], "can't be combined with --errors"),
        (["--since", "soon"], "such as 90s"),
    ],
)
def test_what_excludes_each_other_is_refused(options: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["logs", "x", *options])
    assert words in str(done.exception)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """The folder of a run that has failed in its second attempt."""
    root = tmp_path / "workspace/runs/x"
    run = replace(make_run(nodes=1, ranks_per_node=2), run_dir=str(root), job=JobIdentity("x", "ns", "u"))
    from lockstep_gang.agent.log import Journal

    journal = Journal(run, 0, lambda line: None)
    for attempt in (1, 2):
        journal.begin_attempt(attempt)
        for line in (
            f"[lockstep] attempt {attempt} starts: 2 ranks",
            f"[rank 1] try {attempt}",
            "[lockstep] rank 1 on node 0 exited with 1",
        ):
            journal.write(line)
    journal.close(5)
    (root / "gang").mkdir()
    record = '{"attempt": %d, "jobUid": "u", "restarts": 0, "started": "", "outcome": "Failed", "checkpoint": null, "restart": null}\n'
    (root / "gang/attempts.jsonl").write_text(record % 1 + record % 2)
    failure = {"rank": 1, "node": 0, "cause": "UserCode", "message": "rank 1 on node 0 exited with 1", "lastLines": ["try 2"]}
    (root / "gang/end.json").write_text(json.dumps({"jobUid": "u", "state": "Failed", "message": "it failed", "failure": failure}))
    return tmp_path


def test_a_rank_of_a_local_run_that_has_printed_nothing_is_told(local: Path) -> None:
    silent = CliRunner().invoke(app, ["logs", "x", "--cluster", str(local), "--rank", "0"])
    assert "has printed nothing that matches" in str(silent.exception)


@pytest.mark.parametrize(
    "content", ["", "[]\n", "1\n", '{"attempt": 1}\n', '{"jobUid": "u", "restarts": 0, "attempt": 1, "restart": 5}\n', "[" * 100_000]
)
def test_records_that_a_script_wrote_over_are_told_in_a_sentence(content: str, local: Path) -> None:
    (local / "workspace/runs/x/gang/attempts.jsonl").write_text(content)
    (local / "workspace/runs/x/gang/end.json").unlink()
    told = CliRunner().invoke(app, ["logs", "x", "--cluster", str(local)])
    assert "no run x can be read" in str(told.exception)


class Closing(FakeCluster):
    """Remembers which pods are left when its connection is closed: from then on nobody can remove them."""

    left: list[str] | None = None

    async def __aenter__(self) -> Cluster:
        return self.as_cluster

    async def __aexit__(self, *_: object) -> None:
        self.left = self.names("Pod")


def test_a_reader_is_removed_when_nobody_reads_the_lines_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `lockstep logs demo | head`."""
    cluster = Closing(stateful_set("PerPod"), claim("workspace-x-0"), claim("datasets-x-0"), on_create=starts)
    made: list[str] = []

    target = cast(Any, SimpleNamespace(client=SimpleNamespace(connected=lambda: cluster), namespace="ns"))

    async def folder_lines(place: PodPlace, folder: str, **request: Any) -> AsyncGenerator[str, None]:
        made.append(place.pod)
        for line in PRINTED:
            yield line

    def broken(line: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(module, "folder_lines", folder_lines)
    monkeypatch.setattr(cli_logs, "put", broken)
    with pytest.raises(BrokenPipeError):
        asyncio.run(cli_logs._print(KubernetesJob(target, JOB, cast(Any, None)), ALL))
    assert made and cluster.left == []


def test_of_many_pods_two_are_asked_whom_they_can_t_reach() -> None:
    class Waiting(FakeCluster):
        async def log(self, namespace: str, pod: str, container: str, query: Mapping[str, str]) -> AsyncIterator[str]:
            yield "[lockstep] waiting for the coordinator on node 0"

    pods = [{"metadata": {"name": f"x-{number}"}} for number in range(5)]
    lines = asyncio.run(unheard_lines(Waiting().as_cluster, "ns", pods))
    assert lines == [f"x-{number}: waiting for the coordinator on node 0" for number in range(2)]
