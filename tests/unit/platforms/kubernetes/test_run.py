"""The log of a run without an operator, whose containers may be started again at any moment."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from golden.plan_cases import CONTEXT, job, profile
from lockstep.api.errors import ConfigError, Failed
from lockstep.api.objects import Typed, has_no_pods
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.kube.exec import NotRunning
from lockstep.plan.reconcile.clocks import Earlier
from lockstep.plan.render.objects import freeze
from lockstep.plan.render.resolve import resolve
from lockstep.platforms.clusters.target import Target
from lockstep.platforms.jobs.observe import JobObserver
from lockstep.platforms.jobs.shortresults import Short, measured_steps
from lockstep.platforms.kubernetes import alone as module
from lockstep.platforms.kubernetes import innamespace, shortruns, status
from lockstep.platforms.kubernetes.alone import _ended_since, _follow, _make_room, run_until
from lockstep.platforms.kubernetes.objects import Run, objects
from lockstep.platforms.kubernetes.shortruns import PodRuns
from lockstep.platforms.kubernetes.status import observe_run
from lockstep.platforms.places.orders import Order
from lockstep_gang.contract.report import State, report_file_text
from lockstep_gang.contract.run import parse_run, run_text
from support.fake_cluster import FakeCluster
from support.process_place import ProcessPlace
from unit.plan.reconcile.test_reconcile import report
from unit.virtual_time import VirtualClock

Object = dict[str, Any]


def target(cluster: object) -> Target:
    """Return the namespace `default` behind this connection."""
    return Target(cast(Any, SimpleNamespace(connected=lambda: contextlib.nullcontext(cluster))), "default", "local")


def ran() -> Run:
    """A job of two nodes."""
    resolved = resolve(job(), profile())
    return Run(resolved, freeze(resolved, CONTEXT), "00" * 32, b"")


RUNS = {"state": {"running": {}}}
NO_ROOM = {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}]}


def ended(code: int) -> Object:
    return {"state": {"terminated": {"exitCode": code}}}


def node(number: int, container: Object | None, **metadata: Any) -> Object:
    """`container`: its state; None: the scheduler has no node for it."""
    placed = {"nodeName": f"n{number}"} if container else {}
    status = {"phase": "Running", "containerStatuses": [{"name": "trainer", **container}]} if container else NO_ROOM
    return {"metadata": {"name": f"x-{number}", "uid": f"pod-{number}", **metadata}, "spec": {"containers": [], **placed}, "status": status}


@pytest.mark.parametrize(("code", "failed"), [(0, "False"), (1, "True")])
def test_a_run_whose_container_has_just_ended_is_told_by_its_exit_code(code: int, failed: str) -> None:
    """Its pod shows no file any more, and `logs -f` ends with the job's exit code."""
    run, found = ran(), FakeCluster()
    for item in objects(run):
        found.objects[item["kind"], item["metadata"]["name"]] = item
    pod = {"kind": "Pod", **node(0, ended(code), labels={"lockstep.dev/job": run.name})}
    found.objects["Pod", "x-0"] = pod
    seen = asyncio.run(observe_run(JobObserver(found.as_cluster), found.as_cluster, run.as_job)).job["status"]
    conditions = {condition["type"]: condition["status"] for condition in seen["conditions"]}
    assert (conditions["Failed"], conditions["Complete"]) == (failed, "True" if failed == "False" else "False")


def test_the_record_of_a_run_whose_pods_are_gone_is_looked_at_again_where_its_reader_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ran()
    for item in (made := objects(run)):
        item["metadata"]["labels"] = {"lockstep.dev/job": run.name}
        item["spec"] = {"replicas": 0}
    ended = replace(report(State.COMPLETE).report, job=run.frozen.parsed.job)
    answers = iter([NotRunning("pod x-reader no longer exists"), report_file_text(ended, "2026-01-01T00:00:00Z")])

    @asynccontextmanager
    async def beside(*_: object, **__: object) -> AsyncIterator[ProcessPlace]:
        yield ProcessPlace("pod x-reader")

    async def output_of(*_: object) -> str:
        if isinstance(answer := next(answers), NotRunning):
            raise answer
        return answer

    monkeypatch.setattr(status, "beside", beside)
    monkeypatch.setattr(status, "output_of", output_of)
    assert VirtualClock().run(_ended_since(FakeCluster(*made).as_cluster, run)) == 0


@pytest.mark.parametrize(("left", "is_gone"), [((), True), ((1,), False)])
def test_a_run_at_zero_has_no_pods_once_the_last_of_them_is_gone(left: tuple[int, ...], is_gone: bool) -> None:
    """Whoever waits for its end reads its volume then."""
    run = ran()
    for item in (made := objects(run)):
        item["metadata"] |= {"labels": {"lockstep.dev/job": run.name}, "uid": "u"}
        item["spec"] = {**item.get("spec", {}), "replicas": 0}
    pods = [{"kind": "Pod", **node(number, RUNS, labels={"lockstep.dev/job": run.name})} for number in left]
    cluster = FakeCluster(*made, *pods).as_cluster
    assert has_no_pods(asyncio.run(observe_run(JobObserver(cluster), cluster, run.as_job)).job["status"]) == is_gone


def test_a_run_whose_pods_and_record_are_gone_has_not_ended_as_far_as_can_be_seen() -> None:
    run = ran()
    with pytest.raises(
        ConfigError, match=r"x has no pods and has not ended, as far as can be seen .*: start it again with lockstep run -f"
    ):
        asyncio.run(_ended_since(FakeCluster().as_cluster, run))


class Namespace(FakeCluster):
    """An API server with the objects of a run, and a clock that goes on by 20 s at every look at the pods."""

    def __init__(self, run: Run, *looks: tuple[Object, ...]) -> None:
        super().__init__(*objects(run))
        owner = [{"kind": "ConfigMap", "name": run.frozen.name}]
        for number, item in enumerate(self.objects.values()):
            item["metadata"] |= {"uid": str(number), "ownerReferences": owner if number else []}
        self.looks = list(looks)
        self.now = 1_800_000_000.0
        self.scaled: list[int] = []
        self.deleted: list[str] = []

    async def list(self, kind: str, namespace: str | None = None, query: Mapping[str, str] | None = None) -> Object:
        if kind != "Pod":
            return await super().list(kind, namespace, query)
        self.now += 20
        replicas = self.objects["StatefulSet", "x"]["spec"]["replicas"] if self.objects else 0
        pods = self.looks.pop(0) if len(self.looks) > 1 and replicas else self.looks[0]
        return {"items": list(pods) if replicas else []}

    async def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        pods = {pod["metadata"]["name"]: pod for pod in self.looks[0]} if self.objects else {}
        return pods.get(name) if kind == "Pod" else await super().get(kind, namespace, name)

    async def request(self, method: str, path: str, body: Object, content_type: str) -> None:
        self.scaled.append(body["spec"]["replicas"])
        self.objects["StatefulSet", "x"]["spec"]["replicas"] = self.scaled[-1]

    async def delete(self, kind: str, namespace: str | None, name: str, *_: Any) -> None:
        self.deleted.append(name)
        self.objects.clear()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.001)
    return monkeypatch


def test_a_run_that_holds_part_of_its_nodes_lets_go_and_tries_again(quick: pytest.MonkeyPatch) -> None:
    half, whole = (node(0, RUNS), node(1, None)), (node(0, RUNS), node(1, RUNS))
    server, said = Namespace(ran(), *[half] * 30, whole, (node(0, ended(0)), node(1, ended(0)))), list[str]()
    quick.setattr(module.time, "time", lambda: server.now)
    until_half_is_gone = server.looks

    async def follow() -> int:
        return await asyncio.wait_for(_follow(cast(Cluster, server), ran(), said.append), 20)

    assert asyncio.run(follow()) == 0
    assert until_half_is_gone == [(node(0, ended(0)), node(1, ended(0)))]
    assert server.scaled[:2] == [0, 2]
    assert len(server.scaled) % 2 == 0
    told = "\n".join(said)
    assert "holds 1 of 2 nodes; releases them at " in told
    assert "released 1 of 2 nodes so that another job can run; tries again at " in told


def test_a_run_whose_pods_have_nodes_and_do_not_come_up_is_given_up(quick: pytest.MonkeyPatch) -> None:
    pulling = node(1, {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}})
    server, said = Namespace(ran(), (node(0, RUNS), node(1, None)), (node(0, RUNS), pulling)), list[str]()
    quick.setattr(module.time, "time", lambda: server.now)
    began, clock = server.now, VirtualClock()
    assert clock.run(_follow(cast(Cluster, server), ran(), said.append)) == 1
    assert clock.now - 1000.0 <= 5 + 0.001 * (server.now - began), "the rest of a log is waited for for five seconds"
    assert 1800 <= server.now - began <= 1860
    assert "x-1: image" in said[-2]
    assert said[-1] == "lockstep: giving up: all pods have nodes, but did not start within the 1800 s of startTimeoutSeconds"
    assert server.scaled == []


def test_a_run_that_somebody_scales_to_zero_stays_there(quick: pytest.MonkeyPatch) -> None:
    server = Namespace(ran(), ())
    server.objects["StatefulSet", "x"]["spec"]["replicas"] = 0
    quick.setattr(module.time, "time", lambda: server.now)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(_follow(cast(Cluster, server), ran(), lambda line: None), 0.3))
    assert server.scaled == []


def test_a_run_that_ended_while_nobody_followed_it_makes_room_and_one_that_runs_does_not() -> None:
    started = ran()
    runs = Namespace(started, (node(0, RUNS), node(1, RUNS)))
    with pytest.raises(ConfigError, match="runs: follow it: lockstep logs x -n default -f, or stop it"):
        asyncio.run(_make_room(cast(Cluster, runs), started, lambda line: None))
    assert runs.deleted == []
    over = Namespace(started, (node(0, ended(0)), node(1, ended(0))))
    asyncio.run(_make_room(cast(Cluster, over), started, lambda line: None))
    assert over.deleted == [started.frozen.name]


def two_nodes(**more: Any) -> FakeCluster:
    """With the jobs' account. Pods are made and find no room."""
    room = {"cpu": "64", "memory": "512Gi", "pods": "110"}
    nodes = [{"kind": "Node", "metadata": {"name": name}, "spec": {}, "status": {"allocatable": room}} for name in "ab"]
    return FakeCluster({"kind": "ServiceAccount", "metadata": {"name": "ml-dev-sa"}}, *nodes, **more)


def on_nodes(nodes: int) -> Run:
    resolved = resolve(job(nodes=nodes, gpusPerNode=0), profile())
    return Run(resolved, freeze(resolved, CONTEXT), "00" * 32, b"")


async def left_after(cluster: FakeCluster, run: Run, said: list[str], seconds: float | None) -> None:
    try:
        await run_until(cluster.as_cluster, run, said.append, asyncio.Event(), seconds)
    finally:
        left = [key for key in cluster.objects if key[0] in ("Job", "ConfigMap")]
        assert [name for kind, name in left if kind == "Job" or name == run.frozen.name] == []


def test_nodes_that_the_cluster_does_not_have_are_not_waited_for_unless_somebody_says_so() -> None:
    cluster, said = two_nodes(), list[str]()
    with pytest.raises(
        Failed, match="5 nodes are asked for, and even when idle only 2 of the cluster's 2 could take a pod; --timeout SECONDS waits"
    ):
        asyncio.run(left_after(cluster, on_nodes(5), said, None))
    assert said == [] and cluster.names("StatefulSet") == []
    with pytest.raises(Failed, match="has no result after 0 s"):
        asyncio.run(left_after(cluster, on_nodes(5), said, 0.2))
    assert said[0].startswith("lockstep: 5 nodes are asked for") and "Ctrl-C removes it" in said[1]


def test_a_job_that_waits_for_nodes_which_are_not_there_says_so_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = two_nodes()

    async def follow(*_: object) -> int:
        raise asyncio.CancelledError

    order = Order(job(), cast(Any, SimpleNamespace(profile=profile())), Typed("job.yaml"))
    monkeypatch.setattr(module, "prepare", lambda *_: on_nodes(5))
    monkeypatch.setattr(module, "_follow", follow)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(module.run_in_namespace(order, target(cluster.as_cluster), None))
    first, second, *last = capsys.readouterr().out.splitlines()
    assert first.startswith("lockstep: 5 nodes are asked for") and first.endswith("; the job waits until it has them")
    assert second.endswith("Ctrl-C leaves it running")
    assert any(line.startswith("lockstep: job x runs on; half a minute after its end") for line in last), last
    assert {"x-keeper"} == set(cluster.names("Job")) == set(cluster.names("Role")), "whoever is away, its nodes go at its end"


def test_a_run_that_never_has_a_result_is_given_up_after_a_quarter_of_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, said = VirtualClock(), list[str]()
    monkeypatch.setattr(module, "_follow", lambda *_: asyncio.Event().wait())
    with pytest.raises(Failed, match="x has no result after 900 s \\(--timeout\\)"):
        clock.run(left_after(two_nodes(), on_nodes(2), said, None))
    assert said[-1] == "lockstep: x is removed; its claims stay" and clock.now - 1000.0 == pytest.approx(900, abs=1.0)


def test_a_run_that_is_interrupted_while_its_objects_are_made_leaves_none() -> None:
    def interrupt(item: Object) -> None:
        if item["kind"] == "Service":
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(left_after(two_nodes(on_create=interrupt), on_nodes(2), [], None))


@pytest.mark.parametrize("problem", [None, Failed("no such pod")], ids=["works", "fails"])
async def test_what_a_run_wants_to_do_before_it_is_removed_is_done_while_its_objects_are_there_and_keeps_none_of_them(
    problem: Failed | None,
) -> None:
    cluster, run, said, seen = two_nodes(), on_nodes(2), list[str](), list[list[str]]()

    async def leave() -> None:
        seen.append(cluster.names("StatefulSet"))
        if problem is not None:
            raise problem

    with pytest.raises(Failed, match="has no result"):
        await run_until(cluster.as_cluster, run, said.append, asyncio.Event(), 0.2, leave)
    assert seen == [["x"]] and run.frozen.name not in cluster.names("ConfigMap")
    assert any("may be left there: no such pod" in line for line in said) is (problem is not None)
    assert said[-1] == "lockstep: x is removed; its claims stay"


@pytest.mark.parametrize(
    ("end", "values", "why"),
    [
        ("[lockstep] Complete: all ranks are done", {"1": {"tokens": 5}}, ""),
        ("[lockstep] Failed: rank 0 on node 0 ran out of memory", {}, "rank 0 on node 0 ran out of memory"),
    ],
)
def test_a_measured_run_is_read_and_forgotten_in_its_pods_before_they_go(
    end: str, values: Object, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs/.measured-x"
    (folder / "logs").mkdir(parents=True)
    (folder / "gang").mkdir()
    (folder / "gang/end.json").write_text("{}")
    (folder / "logs/train_log.jsonl").write_text('{"step": 1, "tokens": 5, "loss": 2.0}\n')
    run, said = on_nodes(1), list[str]()
    text = run_text(replace(parse_run(run.frozen.run), run_dir=str(folder)))
    there = replace(run, frozen=replace(run.frozen, run=text))

    async def run_until(cluster: Cluster, run: Run, hear: Any, heard: asyncio.Event, seconds: Any, leave: Any) -> None:
        for line in ("lockstep: x on 1 node", "[rank 0] Complete: not the gang's word", end):
            hear(line)
        await asyncio.wait_for(heard.wait(), 10)
        await leave()

    async def with_image(cluster: Cluster, job: Any, profile: Any, namespace: str) -> Any:
        return profile

    async def running_pods(*_: object) -> dict[int, ProcessPlace]:
        return {0: ProcessPlace("pod x-0")}

    for name, value in (("run_until", run_until), ("with_image", with_image), ("running_pods", running_pods)):
        monkeypatch.setattr(shortruns, name, value)
    monkeypatch.setattr(shortruns, "prepared_to_measure", lambda *_: there)
    runs = PodRuns(target(FakeCluster().as_cluster), profile(), said.append, None)
    measured = asyncio.run(measured_steps(runs, job(), ["tokens"]))
    assert measured == (values, why) and said == ["lockstep: x on 1 node"] and not folder.exists()


async def test_the_last_six_lines_of_a_short_run_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = SimpleNamespace(transport=SimpleNamespace(value="TCP"), nodes=2)
    made = SimpleNamespace(frozen=SimpleNamespace(parsed=SimpleNamespace(run_dir="/x")), resolved=resolved)

    async def run_until(cluster: object, run: object, listen: Callable[[str], None], *_: object) -> None:
        for number in range(20):
            listen(f"line {number}")

    async def as_it_is(cluster: object, job: object, *_: object) -> object:
        return job

    for name, stub in (("with_image", as_it_is), ("run_until", run_until), ("prepared", lambda *_: made)):
        monkeypatch.setattr(shortruns, name, stub)
    runs = PodRuns(target(None), profile(), print, None)
    last = (await runs.run(Short.PREFLIGHT, job(), lambda line: False)).last
    assert last == " | ".join(f"line {number}" for number in range(14, 20))


def test_a_log_that_does_not_end_with_its_container_has_five_seconds(quick: pytest.MonkeyPatch) -> None:
    class Endless(Namespace):
        async def log(self, *_: Any) -> AsyncIterator[str]:
            await asyncio.sleep(20)
            for line in ():
                yield line

    server, clock = Endless(ran(), (node(0, ended(0)), node(1, ended(0)))), VirtualClock()
    assert clock.run(_follow(cast(Cluster, server), ran(), lambda line: None)) == 0
    assert clock.now - 1000.0 == pytest.approx(5, abs=0.1)


def test_pods_of_a_measurement_are_looked_for_twice_a_second() -> None:
    clock, looks = VirtualClock(), list[float]()

    class Coming(FakeCluster):
        async def list(self, *_: Any) -> Object:
            looks.append(clock.now)
            return {"items": [node(0, RUNS), node(1, RUNS)] if len(looks) > 4 else []}

    clock.run(shortruns._all_pods(Coming().as_cluster, ran()))
    assert looks == pytest.approx([1000.0, 1000.5, 1001.0, 1001.5, 1002.0, 1002.0])


def test_a_run_goes_on_without_rights_to_events_and_claims() -> None:
    cluster = two_nodes()
    cluster.refused = {kind: ApiError(403, "Forbidden", "no") for kind in ("Event", "PersistentVolumeClaim")}
    observed = asyncio.run(module._observe(cluster.as_cluster, ran(), {}))
    assert (observed.warnings, observed.sees_claims) == ((), False)


def test_a_run_takes_no_training_job_s_name() -> None:
    run = ran()
    cluster = FakeCluster({"kind": "TrainingJob", "metadata": {"name": run.name}})
    with pytest.raises(ConfigError, match=f"has a TrainingJob {run.name}, and nothing was created: .*lockstep delete {run.name} -n "):
        asyncio.run(module._start(cluster.as_cluster, run, lambda line: None))
    assert cluster.names("ConfigMap") == []


def test_a_retry_goes_on_as_the_run_that_failed_and_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = list[Earlier | None]()

    async def start(order: Order, target: Target, earlier: Earlier | None) -> int:
        orders.append(earlier)
        return 0

    order = Order(job(), cast(Any, None), Typed("job.yaml"), retry=True)
    backend = innamespace.InNamespace(target(None))
    monkeypatch.setattr(innamespace, "run_in_namespace", start)
    monkeypatch.setattr(innamespace, "runs_without_operator", lambda *_: [])
    with pytest.raises(ConfigError, match="there is no run x without an operator in namespace default: start it with"):
        backend.run(order)
    found = {"metadata": {"uid": "u"}, "spec": {"restart": {"retry": 2}}}
    monkeypatch.setattr(innamespace, "runs_without_operator", lambda *_: [found])
    assert (backend.run(order), orders) == (0, [Earlier("u", 2)])
