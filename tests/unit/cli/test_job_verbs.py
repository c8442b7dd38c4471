"""Verbs about jobs: several at once, of all namespaces, with labels, and what they ask before they act."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner, Result

from lockstep.api.errors import ConfigError
from lockstep.cli.jobs import change
from lockstep.cli.main import app, main
from lockstep.platforms.jobs.processes import LocalPlace
from lockstep.platforms.kubernetes.job import KubernetesJob
from lockstep.platforms.places.values import Volume
from support.api_stub import ApiStub, served
from unit.virtual_time import VirtualClock

Object = dict[str, Any]
JOBS = "/apis/lockstep.dev/v1alpha1/namespaces/team/trainingjobs"
ALL_JOBS = "/apis/lockstep.dev/v1alpha1/trainingjobs"
NOT_SUSPENDED = {"type": "Suspended", "status": "False", "reason": "NotSuspended", "message": "spec.suspend is false"}
STOPPING = {"type": "Suspended", "status": "False", "reason": "Stopping", "message": "saving"}
STOPPED = {"type": "Suspended", "status": "True", "reason": "Suspended", "message": "saved at step 7"}


def a_job(name: str, **status: Any) -> Object:
    running = {"type": "Progressing", "status": "True", "reason": "Running", "message": "all ranks run"}
    metadata = {"name": name, "namespace": "team", "uid": name, "creationTimestamp": "2026-11-22T20:00:00Z"}
    return {"metadata": metadata, "spec": {"nodes": 2}, "status": {"conditions": [running, NOT_SUSPENDED], **status}}


@dataclass
class Jobs(ApiStub):
    """Jobs, and what was written to which."""

    patched: list[tuple[str, Any]] = field(default_factory=list)
    suspended: Any = field(default_factory=lambda: itertools.chain([NOT_SUSPENDED, STOPPING], itertools.repeat(STOPPED)))
    """The condition, look by look after the job was asked to stop."""

    def __post_init__(self) -> None:
        jobs = [a_job("a"), a_job("b")]
        self.objects = {f"{JOBS}/{job['metadata']['name']}": job for job in jobs}
        self.objects |= {path: {"metadata": {}, "items": jobs} for path in (JOBS, ALL_JOBS)}

    def answer(self, method: str, path: str, body: Object | bytes | None) -> tuple[int, Object | str]:
        if method in ("PATCH", "DELETE"):
            self.patched.append((path.rsplit("/", 1)[-1], body["spec"] if isinstance(body, dict) and "spec" in body else method))
            if method == "DELETE":
                del self.objects[path]
            return 200, {}
        if path == f"{JOBS}/a" and any(name == "a" for name, _ in self.patched) and path in self.objects:
            return 200, a_job("a", conditions=[next(self.suspended)])
        return super().answer(method, path, body)


def typed(stub: ApiStub, folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Result:
    with served(stub, folder) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        return CliRunner().invoke(app, [*words, "-n", "team", "--context", "c"])


def test_running_jobs_are_named_before_they_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Jobs()
    result = typed(stub, tmp_path, monkeypatch, "delete", "a", "b")
    assert str(result.exception) == "jobs a, b have not ended: use --yes to delete them anyway" and stub.patched == []


@pytest.fixture
def volumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Volumes of two nodes, on this machine, with the files of two jobs."""
    folders = [tmp_path / f"node-{node}" for node in (0, 1)]
    for folder in folders:
        for job in ("a", "b"):
            (folder / "runs" / job / "checkpoints").mkdir(parents=True)
            (folder / "runs" / job / "checkpoints" / "step-7").write_text("x")

    @asynccontextmanager
    async def volume(self: KubernetesJob, node: int, *_: object) -> AsyncIterator[Volume]:
        yield Volume(LocalPlace(), str(folders[node]), "")

    monkeypatch.setattr(KubernetesJob, "volume", volume)
    monkeypatch.setattr(KubernetesJob, "nodes_with_volumes", lambda self: [0, 1])
    return folders


def test_files_of_a_deleted_job_go_on_every_volume_and_those_of_others_stay(
    volumes: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = Jobs()
    stub.objects[f"{JOBS}/a"] = a_job("a", conditions=[{**STOPPED}])
    result = typed(stub, tmp_path, monkeypatch, "delete", "a", "--files", "--yes")
    assert result.stdout == "/workspace/runs/a is removed\na is deleted with its files\n"
    assert re.fullmatch(r"lockstep: delete on the cluster at http://\S+, namespace team\n", result.stderr)
    assert [sorted(path.name for path in (folder / "runs").iterdir()) for folder in volumes] == [["b"], ["b"]]


def test_files_stay_if_a_volume_cannot_be_reached_or_a_job_goes_on_meanwhile(
    volumes: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_are_there() -> bool:
        return all((folder / "runs" / job / "checkpoints/step-7").exists() for folder in volumes for job in ("a", "b"))

    def both_stopped() -> Jobs:
        stub = Jobs()
        stub.objects |= {f"{JOBS}/{name}": a_job(name, conditions=[{**STOPPED}]) for name in ("a", "b")}
        return stub

    def never_started(self: KubernetesJob) -> list[int]:
        if self.name == "b":
            raise ConfigError("job b has never started")
        return [0, 1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KubernetesJob, "nodes_with_volumes", never_started)
        stub = both_stopped()
        result = typed(stub, tmp_path, monkeypatch, "delete", "a", "b", "--files", "--yes")
        assert str(result.exception) == "job b has never started" and stub.patched == [] and all_are_there()

    def resumed(self: KubernetesJob) -> list[int]:
        stub.objects[f"{JOBS}/b"] = {**a_job("b", conditions=[{**STOPPED}]), "spec": {"nodes": 2, "suspend": False}}
        return [0, 1]

    monkeypatch.setattr(KubernetesJob, "nodes_with_volumes", resumed)
    stub = both_stopped()
    result = typed(stub, tmp_path, monkeypatch, "delete", "b", "a", "--files", "--yes")
    assert "job b may still write its files" in str(result.exception) and stub.patched == [] and all_are_there()


def test_a_dev_environment_that_nobody_used_has_files_that_can_go_until_it_is_asked_for(
    volumes: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = {"type": "Suspended", "status": "True", "reason": "Idle", "message": "nobody used it"}
    spec = {"type": "Interactive", "suspend": False, "nodes": 2}
    stub = Jobs()
    stub.objects[f"{JOBS}/a"] = {
        **a_job("a", conditions=[idle], interactive={"released": "x"}),
        "spec": {**spec, "restart": {"retry": 1}},
    }
    result = typed(stub, tmp_path, monkeypatch, "delete", "a", "--files", "--yes")
    assert "job a may still write its files" in str(result.exception)
    stub.objects[f"{JOBS}/a"] = {**a_job("a", conditions=[idle], interactive={"released": "x"}), "spec": spec}
    assert typed(stub, tmp_path, monkeypatch, "delete", "a", "--files", "--yes").exit_code == 0


@pytest.mark.parametrize("words", ["wait a --for Suspended --timeout 60", "stop a"])
def test_an_api_server_that_is_away_for_a_while_ends_no_wait_and_a_deleted_job_does(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Away(Jobs):
        code = 503

        def answer(self, method: str, path: str, body: Object | bytes | None) -> tuple[int, Object | str]:
            if method == "GET" and path == f"{JOBS}/a" and 1 <= next(looks) <= self.code - 500:
                return (503, {"message": "away"}) if self.code < 600 else (404, {})
            return super().answer(method, path, body)

    for module in ("get", "change"):
        monkeypatch.setattr(f"lockstep.cli.jobs.{module}.POLL_SECONDS", 0.01)
    looks, stub = itertools.count(), Away()
    if words.startswith("wait"):
        stub.objects[f"{JOBS}/a"] = a_job("a", conditions=[STOPPED])
    result = typed(stub, tmp_path, monkeypatch, *words.split())
    assert result.exit_code == 0 and result.stderr.count("this goes on when it answers again") == 1, result.output
    looks, stub = itertools.count(), Away()
    stub.code = 10_000
    assert str(typed(stub, tmp_path, monkeypatch, *words.split()).exception) == "job a was deleted"


def job_file(path: Path, name: str, **metadata: str) -> str:
    document = {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": name, **metadata}}
    path.write_text(json.dumps({**document, "spec": {"script": {"path": "/a.py"}}}))
    return str(path)


def test_the_jobs_of_files_and_of_folders_are_deleted_and_nothing_where_one_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    one, _, claim = job_file(tmp_path / "a.json", "a"), job_file(folder / "b.yaml", "b"), folder / "claim.yaml"
    claim.write_text("kind: PersistentVolumeClaim\n")
    stub = Jobs()
    result = typed(stub, tmp_path, monkeypatch, "delete", "--yes", "-f", one, "-f", str(folder), "-f", one)
    assert (result.exit_code, stub.patched) == (0, [("a", "DELETE"), ("b", "DELETE")])
    assert "claim.yaml holds no TrainingJob and is skipped" in result.stderr
    other, stub = job_file(tmp_path / "other.json", "nope"), Jobs()
    result = typed(stub, tmp_path, monkeypatch, "delete", "--yes", "-f", one, "-f", other)
    assert f"{other}: there is no TrainingJob nope in namespace team" in str(result.exception) and stub.patched == []
    result = typed(stub, tmp_path, monkeypatch, "delete", "--yes", "-f", job_file(tmp_path / "ml.json", "a", namespace="ml"))
    assert "metadata.namespace is ml, but --namespace is team" in str(result.exception) and stub.patched == []
    for words in ([], ["a", "-f", one]):
        assert "name the jobs, or use -f FILE" in str(typed(stub, tmp_path, monkeypatch, "delete", "--yes", *words).exception)
    assert stub.patched == []


def test_stop_says_nothing_that_was_so_before_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = typed(Jobs(), tmp_path, monkeypatch, "stop", "a")
    assert (result.exit_code, result.stdout) == (0, "a: saving\na: saved at step 7\n")


def test_jobs_of_every_namespace_are_listed_with_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Jobs()
    result = typed(stub, tmp_path, monkeypatch, "get", "-A", "-l", "team=nlp")
    heads, *lines = result.output.splitlines()
    assert heads.split()[:2] == ["NAMESPACE", "NAME"] and [line.split()[:2] for line in lines] == [["team", "a"], ["team", "b"]]
    (query,) = [query for _, path, query in stub.asked if path == ALL_JOBS]
    assert query == {"labelSelector": "team=nlp"}


def test_names_and_ways_of_choosing_do_not_go_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "use either names of jobs" in str(typed(Jobs(), tmp_path, monkeypatch, "get", "a", "-A").exception)
    assert "--watch prints a table" in str(typed(Jobs(), tmp_path, monkeypatch, "get", "-w", "-o", "json").exception)
    assert typed(Jobs(), tmp_path, monkeypatch, "get", "b", "a", "-o", "name").output.split() == [
        "trainingjob.lockstep.dev/b", "trainingjob.lockstep.dev/a",
    ]  # fmt: skip


def test_watching_looks_every_two_seconds_and_prints_a_job_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep.cli.jobs import get

    stub, looks, pauses = Jobs(), itertools.count(1), list[float]()

    def next_look(seconds: float) -> None:
        pauses.append(seconds)
        look = next(looks)
        if look == 2:
            stub.objects[JOBS]["items"][1]["status"]["restarts"] = 1
        if look == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(get.time, "sleep", next_look)
    result = typed(stub, tmp_path, monkeypatch, "get", "-w")
    assert result.exit_code == 130
    assert [line.split()[0] for line in result.output.splitlines()] == ["NAME", "a", "b", "b"]
    assert pauses == [2.0] * 3


def with_two_nodes() -> Jobs:
    stub = Jobs()
    room = {"cpu": "64", "memory": "512Gi", "pods": "110"}
    nodes = [{"metadata": {"name": name}, "spec": {}, "status": {"allocatable": room}} for name in "xy"]
    stub.objects["/api/v1/nodes"] = {"metadata": {}, "items": nodes}
    template = {"spec": {"containers": [{"resources": {"requests": {"cpu": "1"}}}]}}
    stub.objects["/apis/apps/v1/namespaces/team/statefulsets/a"] = {"metadata": {"name": "a"}, "spec": {"template": template}}
    return stub


def test_a_job_is_not_stopped_for_nodes_that_are_not_there_unless_somebody_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = with_two_nodes()
    result = typed(stub, tmp_path, monkeypatch, "scale", "a", "99")
    assert "even when idle only 2 could take a pod: a would stop and wait for them. Use --yes" in str(result.exception)
    assert stub.patched == []
    assert typed(stub, tmp_path, monkeypatch, "scale", "a", "99", "--yes").exit_code == 0
    assert stub.patched == [("a", {"nodes": 99})]


class NoPrograms(Jobs):
    """Both pods of job b run, and the person may not run programs in them."""

    def answer(self, method: str, path: str, body: Object | bytes | None) -> tuple[int, Object | str]:
        if path.endswith("/exec"):
            return 403, {"kind": "Status", "status": "Failure", "reason": "Forbidden", "message": "pods/exec is forbidden", "code": 403}
        if path.endswith("/pods"):
            status = {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": {"running": {}}}]}
            return 200, {
                "metadata": {},
                "items": [{"metadata": {"name": f"b-{node}", "namespace": "team"}, "status": status} for node in (0, 1)],
            }
        return super().answer(method, path, body)


def test_who_may_not_run_programs_in_pods_is_told_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = typed(NoPrograms(), tmp_path, monkeypatch, "stacks", "b")
    assert str(result.exception).startswith(
        "you may not run programs in pods of namespace team (pods/exec): ask an administrator for the role edit"
    )
    assert result.output == ""


def retried(taken_back: bool) -> Object:
    """A job that failed, was told to go on, and is complete once the operator has taken that back."""
    ends = {"Complete": "True", "Failed": "False"} if taken_back else {"Complete": "False", "Failed": "True"}
    conditions = [{"type": kind, "status": value, "reason": kind, "message": ""} for kind, value in ends.items()]
    return {**a_job("a", conditions=conditions, **({"retry": 1} if taken_back else {})), "spec": {"nodes": 2, "restart": {"retry": 1}}}


@dataclass
class Watched(Jobs):
    """Job a is another one at each look."""

    shows: Callable[[int], Object] = retried
    looks: int = 0

    def answer(self, method: str, path: str, body: Object | bytes | None) -> tuple[int, Object | str]:
        if path != f"{JOBS}/a":
            return super().answer(method, path, body)
        self.looks += 1
        return 200, self.shows(self.looks)


def test_a_wait_right_after_a_retry_does_not_end_with_the_failure_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.cli.jobs.get.POLL_SECONDS", 0.01)
    result = typed(Watched(shows=lambda look: retried(taken_back=look > 3)), tmp_path, monkeypatch, "wait", "a")
    assert result.exit_code == 0 and "a: Retried: restart.retry was raised" in result.output


COMMITTED = {"type": "CheckpointCommitted", "status": "True", "reason": "Committed", "message": ""}
SUSPENDED = {"type": "Progressing", "status": "False", "reason": "Suspended", "message": "saved at step 7"}
OLD_COMMIT = {"checkpoint": {"lastCommittedStep": 7, "lastCommitTime": "2026-11-22T21:00:00Z"}, "startTime": "2026-11-22T20:00:00Z"}
STOP = {"stop": {"time": "2026-11-22T21:00:01Z", "attempt": 1, "save": "Saved"}}


@pytest.mark.parametrize(
    "old",
    [
        a_job("a", conditions=[SUSPENDED, COMMITTED], **OLD_COMMIT, **STOP),
        a_job(
            "a",
            **OLD_COMMIT | {"conditions": [a_job("a")["status"]["conditions"][0], COMMITTED], "active": {"since": "2026-11-22T22:00:00Z"}},
        ),
        a_job("a", **OLD_COMMIT | {"conditions": [COMMITTED], "restartHistory": [{"attempt": 1, "time": "2026-11-22T21:30:00Z"}]}),
    ],
    ids=["stopped", "started again", "restarted"],
)
def test_a_wait_for_a_commit_is_not_over_with_one_of_an_earlier_start(old: Object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = {"lastCommittedStep": 9, "lastCommitTime": "2026-11-22T23:00:00Z"}
    monkeypatch.setattr("lockstep.cli.jobs.get.POLL_SECONDS", 0.01)
    stub = Watched(shows=lambda look: old if look < 4 else {**old, "status": {**old["status"], "checkpoint": commit}})
    assert typed(stub, tmp_path, monkeypatch, "wait", "a", "--for", "CheckpointCommitted").exit_code == 0
    assert stub.looks == 4


def test_a_commit_of_this_start_or_of_a_job_that_has_ended_needs_no_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = {"type": "Complete", "status": "True", "reason": "Complete", "message": ""}
    for job in (a_job("a", conditions=[COMMITTED], **OLD_COMMIT), a_job("a", conditions=[COMMITTED, complete], **OLD_COMMIT, **STOP)):
        stub = Jobs()
        stub.objects[f"{JOBS}/a"] = job
        assert typed(stub, tmp_path, monkeypatch, "wait", "a", "--for", "checkpointcommitted").exit_code == 0


def test_get_takes_no_job_s_own_config_map_for_a_run_of_in_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Jobs()
    owned = {"ownerReferences": [{"kind": "TrainingJob", "name": "a"}], "labels": {"lockstep.dev/run": "a"}}
    maps = [{"metadata": {"name": "a-run-12ab", "namespace": "team", **owned}}]
    stub.objects = {JOBS: {"metadata": {}, "items": []}, "/api/v1/namespaces/team/configmaps": {"metadata": {}, "items": maps}}
    assert typed(stub, tmp_path, monkeypatch, "get").output == "there is no TrainingJob in namespace team\n"


def test_get_shows_the_cluster_s_nodes_for_a_job_that_states_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Jobs()
    stub.objects[f"{JOBS}/a"] = {**a_job("a", runningNodes=1), "spec": {"cluster": "local"}}
    with served(stub, tmp_path) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        printed = CliRunner().invoke(app, ["get", "a", "-n", "team", "--cluster", "local"]).output
    assert printed.splitlines()[1].split()[:2] == ["a", "1/2"]


def test_a_retry_that_failed_itself_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = retried(taken_back=False)
    stub = Jobs()
    stub.objects[f"{JOBS}/a"] = {**failed, "status": {**failed["status"], "retry": 1}}
    assert typed(stub, tmp_path, monkeypatch, "wait", "a").exit_code == 1


@pytest.mark.parametrize("words", [["debug", "x"], ["debug", "x", "train.py", "--attach"]])
def test_a_debugger_gets_a_script_to_start_or_one_that_waits(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["lockstep", *words])
    assert main() == 2
    assert capsys.readouterr().err.startswith("lockstep: name either a script to start, or --attach for one that waits already: ")


def test_a_stop_is_looked_at_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks = VirtualClock(), list[float]()
    monkeypatch.setattr(change, "time", clock)

    def look_again() -> Object:
        looks.append(clock.now - 1000.0)
        return {
            "conditions": [{"type": "Suspended", "status": "True" if len(looks) == 4 else "False", "reason": "Suspending", "message": ""}]
        }

    change._until_stopped(cast(Any, SimpleNamespace(name="x", status={}, look_again=look_again)), clock.now + 600)
    assert looks == [0, 0.5, 1.0, 1.5]


def test_a_job_has_at_most_1024_nodes() -> None:
    result = CliRunner().invoke(app, ["scale", "x", "1025"])
    assert result.exit_code == 2 and "less than or equal to 1024" in result.output
