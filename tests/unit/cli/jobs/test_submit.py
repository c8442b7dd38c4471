"""`lockstep run -f` where the operator works: what is created, what is said of it, and the exit code."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.shared import folders
from support.api_stub import ApiStub, served
from support.in_process import Told, lockstep

Object = dict[str, Any]
JOBS = "/apis/lockstep.dev/v1alpha1/namespaces/team/trainingjobs"
LOG = "/api/v1/namespaces/team/pods/demo-0/log"
DEPLOYMENT = "/apis/apps/v1/namespaces/lockstep-system/deployments/lockstep-operator"
OPERATOR = {
    "kind": "Deployment",
    "metadata": {"name": "lockstep-operator", "namespace": "lockstep-system"},
    "spec": {"template": {"spec": {"containers": [{"image": "i"}]}}},
}
LINES = "2026-11-27T12:00:00.000000001Z [0] step 1\n2026-11-27T12:00:00.000000002Z [0] step 2\n"
JOB = {
    "apiVersion": "lockstep.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "demo"},
    "spec": {"nodes": 2, "training": {"model": {"name": "/workspace/models/m"}, "data": {"path": "/datasets/d.jsonl"}}},
}


def status(*conditions: tuple[str, str, str, str]) -> Object:
    return {"conditions": [{"type": kind, "status": value, "reason": reason, "message": text} for kind, value, reason, text in conditions]}


ACCEPTED = ("Accepted", "True", "Accepted", "the job fits its cluster")
QUEUED = status(ACCEPTED, ("Progressing", "False", "Unschedulable", "0 of 2 pods scheduled"))
DONE = status(ACCEPTED, ("Complete", "True", "Complete", "done"), ("Progressing", "False", "Complete", "the job is complete"))
BROKEN = status(ACCEPTED, ("Failed", "True", "RanksFailed", "rank 1 failed"), ("Progressing", "False", "Failed", "rank 1 failed"))
REFUSED = "spec.cluster is away, but there is no such TrainingCluster"


def refused(reason: str) -> Object:
    return status(("Accepted", "False", reason, REFUSED), ("Progressing", "False", reason, REFUSED))


Answer = tuple[int, Object | str]


@dataclass
class Cluster(ApiStub):
    """A cluster whose operator writes one status after the other, the last for ever. `first` answers before it, or with None."""

    statuses: list[Object] = field(default_factory=lambda: [{}, QUEUED, DONE])
    created: list[Object] = field(default_factory=list)
    refusal: tuple[int, str] | None = None
    first: Callable[[str, str, Cluster], Answer | None] = lambda method, path, cluster: None

    def __post_init__(self) -> None:
        self.objects |= {DEPLOYMENT: OPERATOR}
        self._next: Iterator[Object] = itertools.chain(self.statuses, itertools.repeat(self.statuses[-1]))

    def answer(self, method: str, path: str, body: Object | bytes | None) -> Answer:
        if (other := self.first(method, path, self)) is not None:
            return other
        if (method, path) == ("POST", JOBS) and isinstance(body, dict):
            if self.refusal is not None:
                code, text = self.refusal
                return code, {"kind": "Status", "status": "Failure", "reason": "Refused", "message": text, "code": code}
            self.created.append(body)
            return 201, {**body, "metadata": {**body["metadata"], "uid": "u"}}
        if path == f"{JOBS}/demo" and self.created:
            created = self.created[-1]
            return 200, {**created, "metadata": {**created["metadata"], "uid": "u"}, "status": next(self._next)}
        if path == LOG:
            return (200, LINES) if self.created and self.statuses[-1] in (DONE, BROKEN) else (404, {})
        return super().answer(method, path, body)


def not_removed(method: str, path: str, cluster: Cluster) -> Answer | None:
    return (403, {"message": "no"}) if method == "DELETE" else None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("job.json").write_text(json.dumps(JOB))
    monkeypatch.setattr("lockstep.platforms.kubernetes.submit.POLL_SECONDS", 0.01)
    monkeypatch.setattr("lockstep.platforms.kubernetes.submit.LASTS_SECONDS", 0.0)
    return tmp_path


def typed(stub: ApiStub, folder: Path, *words: str, namespace: str = "team") -> Told:
    with served(stub, folder) as kubeconfig, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(kubeconfig))
        return lockstep("run", "-f", "job.json", "--context", "c", "-n", namespace, *words)


def test_a_job_is_created_and_followed_to_its_end(folder: Path) -> None:
    stub = Cluster()
    done = typed(stub, folder, "--set", "training.lora.rank=4", "--nodes", "3", "--fresh")
    assert done.returncode == 0, done.stderr
    (created,) = stub.created
    assert created["metadata"]["namespace"] == "team" and "cluster" not in created["spec"]
    assert (created["spec"]["nodes"], created["spec"]["training"]["lora"]["rank"]) == (3, 4)
    assert created["spec"]["training"]["checkpoint"]["resumeFrom"] == "None"
    applied = json.loads(created["metadata"]["annotations"]["kubectl.kubernetes.io/last-applied-configuration"])
    assert applied["spec"] == created["spec"]
    assert done.stdout.splitlines() == ["[0] step 1", "[0] step 2"]
    place, *says = done.stderr.splitlines()
    assert place.startswith("lockstep: run on the cluster at http://") and place.endswith(", namespace team")
    assert says[0].startswith("lockstep: job demo (3 nodes) is created in namespace team of the cluster at http://")
    assert says[0].endswith("it goes on without this terminal: lockstep logs demo -n team --context c -f")
    assert says[-1] == "lockstep: job demo is complete: lockstep describe demo -n team --context c shows where its results are"


def test_a_job_that_fails_ends_with_1_and_its_reason(folder: Path) -> None:
    failed = typed(Cluster(statuses=[BROKEN]), folder)
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1] == "lockstep: job demo has failed: rank 1 failed: lockstep why demo -n team --context c"


@pytest.mark.parametrize("lasts", [True, False])
def test_what_a_job_waits_for_is_said_until_there_is_a_log_where_it_lasts(
    lasts: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.platforms.kubernetes.submit.LASTS_SECONDS", 0.0 if lasts else 600.0)
    looks = itertools.count()
    slow = Cluster(statuses=[QUEUED, DONE], first=lambda method, path, cluster: (404, {}) if path == LOG and next(looks) < 1 else None)
    done = typed(slow, folder)
    assert done.returncode == 0
    assert ("lockstep: demo: Unschedulable: 0 of 2 pods scheduled" in done.stderr.splitlines()) is lasts
    assert done.stdout.splitlines() == ["[0] step 1", "[0] step 2"]


def test_a_job_that_fails_before_it_has_a_log_ends_with_its_reason_alone(folder: Path) -> None:
    failed = typed(Cluster(statuses=[BROKEN], first=lambda method, path, cluster: (404, {}) if path == LOG else None), folder)
    assert failed.returncode == 1 and failed.stdout == ""
    assert failed.stderr.splitlines()[2:] == ["lockstep: job demo has failed: rank 1 failed: lockstep why demo -n team --context c"]


def test_a_job_is_left_to_the_operator_once_that_has_accepted_it(folder: Path) -> None:
    detached = typed(Cluster(statuses=[{}, refused("PreviousJobRemains"), QUEUED]), folder, "--detach")
    assert (detached.returncode, detached.stdout) == (0, "")
    assert detached.stderr.splitlines()[-1] == "lockstep: the operator has accepted job demo"


@pytest.mark.parametrize(
    ("reason", "more", "code", "says"),
    [
        ("NoGPUs", [], 2, f"refuses job demo: {REFUSED}; it was removed again: correct job.json, then lockstep run -f job.json -n team"
                          f" --context c"),
        ("NoGPUs", ["--detach"], 2, "it was removed again"),
        ("ClusterNotFound", [], 2, f"refuses job demo: {REFUSED}; it was removed again: once the cluster is right: lockstep run -f job.json"
                                   f" -n team --context c"),
        ("ClusterNotFound", ["--detach"], 2, "it was removed again"),
        ("ServiceAccountNotFound", [], 1,
            f"job demo is not accepted yet: {REFUSED}; it starts by itself then: lockstep why demo -n team --context c\n"),
        ("ServiceAccountNotFound", ["--detach"], 1,
            f"job demo is not accepted yet: {REFUSED}; it starts by itself then: lockstep why demo"),
    ],
)  # fmt: skip
def test_a_job_that_the_operator_refuses_ends_with_what_to_do(reason: str, more: list[str], code: int, says: str, folder: Path) -> None:
    stub = Cluster(statuses=[{}, refused(reason)])
    ended = typed(stub, folder, *more)
    assert ended.returncode == code and says in ended.stderr
    assert [path for method, path, _ in stub.asked if method == "DELETE"] == ([f"{JOBS}/demo"] if code == 2 else [])


def test_a_job_that_was_there_before_waits_for_its_cluster_and_so_does_one_that_cannot_be_removed(folder: Path) -> None:
    before = [JOB | {"metadata": {"name": "demo", "namespace": "team"}}]
    there = typed(Cluster(created=before, statuses=[refused("ClaimSizeInvalid")]), folder)
    assert there.returncode == 1 and "is not accepted yet" in there.stderr and "it starts by itself then" in there.stderr
    kept = typed(Cluster(statuses=[refused("ClusterNotFound")], first=not_removed), folder)
    assert kept.returncode == 2 and "it stays there, and starts by itself once the cluster is right, or lockstep delete demo" in kept.stderr


@pytest.mark.parametrize("before", [[QUEUED], [{"startTime": "2026-11-27T12:00:00Z"}]])
def test_a_job_that_was_accepted_once_stays_though_the_operator_refuses_it_later(before: list[Object], folder: Path) -> None:
    stub = Cluster(statuses=[*before, {**refused("NoGPUs"), "startTime": "2026-11-27T12:00:00Z"}])
    ended = typed(stub, folder)
    assert ended.returncode == 2 and "it stays there: correct job.json" in ended.stderr
    assert [method for method, _, _ in stub.asked if method == "DELETE"] == []


@pytest.mark.parametrize("more", [[], ["--detach"]])
def test_a_job_that_is_deleted_while_it_is_watched_ends_the_verb(more: list[str], folder: Path) -> None:
    def taken(method: str, path: str, cluster: Cluster) -> Answer | None:
        return (404, {}) if path == f"{JOBS}/demo" and cluster.created and next(looks) > 1 else None

    looks = itertools.count()
    ended = typed(Cluster(statuses=[{}], first=taken), folder, *more)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (1, "lockstep: job demo was deleted")


@pytest.mark.parametrize("more", [[], ["--detach"]])
def test_an_api_server_that_is_away_for_a_while_does_not_end_the_verb(more: list[str], folder: Path) -> None:
    def away(method: str, path: str, cluster: Cluster) -> Answer | None:
        is_away = path == f"{JOBS}/demo" and cluster.created and next(looks) in range(1, 4)
        return (503, {"message": "the server is currently unable to handle the request"}) if is_away else None

    looks = itertools.count()
    ended = typed(Cluster(statuses=[{}, QUEUED, DONE], first=away), folder, *more)
    assert ended.returncode == 0
    (line,) = [line for line in ended.stderr.splitlines() if line.endswith("this goes on when it answers again")]
    assert "currently unable to handle the request (503" in line


def test_a_job_whose_log_may_not_be_read_goes_on(folder: Path) -> None:
    def closed(method: str, path: str, cluster: Cluster) -> Answer | None:
        return (403, {"message": "pods/log is forbidden"}) if path == LOG else None

    ended = typed(Cluster(statuses=[QUEUED], first=closed), folder)
    assert ended.returncode == 1 and ended.stderr.splitlines()[-1].endswith("; job demo goes on: lockstep logs demo -n team --context c -f")


def test_a_refused_job_that_was_there_before_or_cannot_be_removed_stays(folder: Path) -> None:
    before = [JOB | {"metadata": {"name": "demo", "namespace": "team"}}]
    for stub in (Cluster(statuses=[refused("InvalidSpec")], first=not_removed), Cluster(created=before, statuses=[refused("InvalidSpec")])):
        ended = typed(stub, folder)
        assert (
            ended.returncode == 2
            and "it stays there: correct job.json, then kubectl apply --context c -n team -f job.json, or" in ended.stderr
        )
    assert [method for method, _, _ in stub.asked if method == "DELETE"] == []


@pytest.mark.parametrize(
    ("refusal", "code", "says"),
    [
        ((422, "spec.nodes: Invalid value"), 2, "lockstep: job.json: the API server refuses it: spec.nodes: Invalid value"),
        ((404, "the server could not find the requested resource"), 1, "lockstep: this cluster doesn't know TrainingJobs: no operator"),
        ((404, 'namespaces "team" not found'), 1, "lockstep: there is no namespace team: name another one with -n, or create it"),
        ((403, 'User "x" cannot create resource "trainingjobs" in API group'), 1, "an administrator of the namespace can grant it"),
    ],
)
def test_what_the_api_server_refuses_is_said_as_other_verbs_say_it(refusal: tuple[int, str], code: int, says: str, folder: Path) -> None:
    ended = typed(Cluster(refusal=refusal), folder)
    assert ended.returncode == code and says in ended.stderr


def test_nothing_is_created_where_no_operator_works(folder: Path) -> None:
    stub = Cluster()
    del stub.objects[DEPLOYMENT]
    ended = typed(stub, folder)
    assert ended.returncode == 1 and stub.created == []
    assert ended.stderr.splitlines()[1].startswith("lockstep: nothing was created: no operator is installed: lockstep deploy CLUSTER")


def test_the_same_job_is_followed_and_another_one_is_left_alone(folder: Path) -> None:
    stub = Cluster(created=[JOB | {"metadata": {"name": "demo", "namespace": "team"}}], statuses=[QUEUED, DONE])
    again = typed(stub, folder)
    assert again.returncode == 0 and len(stub.created) == 1
    assert "job demo is in namespace team already, as job.json describes it, and has not ended: this follows it" in again.stderr
    stub = Cluster(created=[JOB | {"metadata": {"name": "demo", "namespace": "team"}}], statuses=[QUEUED])
    left = typed(stub, folder, "--detach")
    assert left.returncode == 0 and "as job.json describes it, and has not ended\n" in left.stderr
    stub = Cluster(created=[JOB | {"metadata": {"name": "demo", "namespace": "team"}}], statuses=[QUEUED])
    other = typed(stub, folder, "--set", "nodes=5")
    assert other.returncode == 2 and [method for method, _, _ in stub.asked if method != "GET"] == []
    _, sentence, *steps = other.stderr.splitlines()
    assert sentence.endswith("which has not ended and differs from job.json in nodes; nothing was changed:")
    assert steps[1].strip().startswith("lockstep scale demo -n team --context c 5   #")
    stub = Cluster(created=[JOB | {"metadata": {"name": "demo", "namespace": "team"}}], statuses=[DONE])
    assert typed(stub, folder).returncode == 2


def test_a_file_of_another_cluster_is_refused(folder: Path) -> None:
    Path("job.json").write_text(json.dumps({**JOB, "spec": {**JOB["spec"], "cluster": "barcelona"}}))  # type: ignore[dict-item]
    stub = Cluster()
    ended = typed(stub, folder, "--cluster", "local")
    assert ended.returncode == 2 and stub.created == []
    assert "job.json: spec.cluster is barcelona, but --cluster is local" in ended.stderr


def test_options_of_hosts_are_refused_on_a_cluster(folder: Path) -> None:
    ended = typed(Cluster(), folder, "--first", "h0")
    assert ended.returncode == 2 and "is for a job on hosts" in ended.stderr


def test_the_namespace_is_the_file_s_before_the_cluster_s(folder: Path) -> None:
    Path("job.json").write_text(json.dumps({**JOB, "metadata": {"name": "demo", "namespace": "team"}}))
    stub = Cluster()
    with served(stub, folder) as kubeconfig, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(kubeconfig))
        assert lockstep("run", "-f", "job.json", "--context", "c").returncode == 0
    assert stub.created[0]["metadata"]["namespace"] == "team"


def test_the_cluster_in_use_goes_into_a_job_that_names_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_STATE", str(folder / "state"))
    folders.remember("local")
    stub = Cluster()
    with served(stub, folder) as kubeconfig, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(kubeconfig))
        done = lockstep("run", "-f", "job.json", "-n", "team")
    assert done.returncode == 0, done.stderr
    assert stub.created[0]["spec"]["cluster"] == "local"


def test_a_cluster_that_was_named_goes_into_the_job(folder: Path) -> None:
    text = (Path(__file__).parents[4] / "clusters" / "local.yaml").read_text().replace("name: local", "name: mine")
    stub = Cluster()
    with served(stub, folder) as kubeconfig, pytest.MonkeyPatch.context() as patch:
        Path("mine.yaml").write_text(text)
        patch.setenv("KUBECONFIG", str(kubeconfig))
        done = lockstep("run", "-f", "job.json", "--context", "c", "--cluster", "mine.yaml", "-n", "team")
    assert done.returncode == 0, done.stderr
    assert stub.created[0]["spec"]["cluster"] == "mine"
    assert "is created in namespace team of cluster mine;" in done.stderr


def test_ctrl_c_ends_the_output_and_says_how_to_look_again_and_how_to_stop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lockstep.platforms.kubernetes.submit._until", interrupted)
    monkeypatch.setattr("lockstep.platforms.kubernetes.submit._follow", interrupted)
    stub = Cluster()
    ended = typed(stub, folder)
    assert ended.returncode == 130
    assert ended.stderr.splitlines()[-1].endswith(
        "job demo goes on: lockstep logs demo -n team --context c -f shows it again, lockstep stop demo -n team --context c saves and"
        " stops it"
    )
    assert len(stub.created) == 1 and [method for method, _, _ in stub.asked if method not in ("GET", "POST")] == []
