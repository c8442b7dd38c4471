"""The operator is killed at each of its writes, and its writes go wrong: what is left afterwards is always the same.

Here all kills of a scenario come in one run, each write killed on one side of it. `make test-operator-faults` (half an hour) gives each
write, and either side of it, a run of its own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from lockstep.api.names import LABEL_JOB
from support.clusters.cluster_jobs import Jobs
from support.clusters.control_plane import Plane
from support.clusters.fault_proxy import Fault
from support.clusters.operator_faults import SCENARIOS, SYSTEM, Rig, is_suspended, operator_process, rig_in, settled, tell, written
from support.clusters.played_job import JOB, PlayedJob

WRITES_MAX = 60
ALONE = os.environ.get("LOCKSTEP_FAULTS") == "all"


@pytest.fixture(scope="module")
def rig(plane: Plane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig_in(tmp_path_factory.mktemp("faults"), plane) as found:
        yield found


def runs(rig: Rig, name: str) -> Iterator[dict[int, Fault]]:
    """The faults of each run, by the number of the write."""
    before, after = Fault(before=rig.operator.start), Fault(after=rig.operator.start)
    if ALONE:
        yield from ({number: fault} for number in range(WRITES_MAX) for fault in (before, after))
    else:
        turn = list(SCENARIOS).index(name)
        yield {number: (before, after)[(number + turn) % 2] for number in range(WRITES_MAX)}


@pytest.mark.timeout(3600 if ALONE else 900)
@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_at_each_write_it_reaches_the_same_state(rig: Rig, name: str) -> None:
    """Status without times, all objects, and what events told, as a set."""
    reference = tell(rig, SCENARIOS[name], {}, None)
    kills = 0
    for faults in runs(rig, name):
        told = tell(rig, SCENARIOS[name], faults, reference.state).faults
        kills += told
        if told == 0:
            break
    print(f"{name}: {reference.steps} writes, {kills} kills")
    assert kills >= min(reference.steps, 3)


@pytest.mark.parametrize("name", ["create", "resize", "complete"])
def test_writes_that_are_refused_or_whose_replies_are_lost_are_made_good(rig: Rig, name: str) -> None:
    """Every write meets one of the faults, in turn. Events may be missing then, or tell of the refusal: they are not retried."""
    reference = tell(rig, SCENARIOS[name], {}, None, events=False)
    kinds = [
        *(Fault(refuse=code) for code in (409, 422, 429, 500)), Fault(after=lambda: None), Fault(after=rig.proxy.cut_watches),
        Fault(after=rig.proxy.expire_watches),
    ]  # fmt: skip
    turn = list(SCENARIOS).index(name)
    faults = {number: kinds[(number + turn) % len(kinds)] for number in range(WRITES_MAX)}
    assert tell(rig, SCENARIOS[name], faults, reference.state, events=False).faults > 0


def test_what_a_list_says_of_a_running_job_is_no_reason_to_write(rig: Rig) -> None:
    """Its StatefulSet was changed by somebody else while no watch ran, and where that is nothing to Lockstep."""
    with rig.job() as job:
        SCENARIOS["restart"].prepare(job)
        settled(rig, job)
        rig.proxy.arm(job.jobs.namespace, {})
        rig.operator.send(signal.SIGSTOP)
        rig.proxy.expire_watches()
        job.jobs.patch("StatefulSet", JOB, {"metadata": {"annotations": {"somebody": "else"}}}, "apps/v1")
        rig.operator.send(signal.SIGCONT)
        settled(rig, job, 3.0)  # node 0 reports, and each report is a look
        assert written(rig) == ""


def test_a_newer_operator_takes_over_a_running_job_without_touching_its_pods(rig: Rig) -> None:
    """Its agent's image is another, and so is the pod template that it would make."""
    with rig.job() as job:
        SCENARIOS["restart"].prepare(job)
        pods, before = job.uids("Pod"), job.jobs.get("StatefulSet", JOB, "apps/v1") or {}
        rig.operator.kill()
        with operator_process({**rig.settings, "LOCKSTEP_AGENT_IMAGE": "agent:2"}, rig.folder):
            job.until("status says that a newer run waits", lambda: job.jobs.job(JOB)["status"]["run"]["pending"])
            job.fail_and_start_again()
            job.until("the second attempt is in status", job.runs)
            after = job.jobs.get("StatefulSet", JOB, "apps/v1") or {}
        rig.operator.start()
        assert job.uids("Pod") == pods
        assert after["metadata"]["generation"] == before["metadata"]["generation"]


def test_deleting_a_job_needs_no_operator(rig: Rig) -> None:
    with rig.job() as job:
        SCENARIOS["delete"].prepare(job)
        rig.operator.kill()
        job.revive = lambda: None
        SCENARIOS["delete"].act(job)
        job.until("the job is gone", lambda: SCENARIOS["delete"].is_done(job))
    rig.operator.start()


def run_of(job: PlayedJob) -> str:
    return str(job.jobs.job(JOB)["status"]["run"]["name"])


def relabel(job: PlayedJob, kind: str, name: str, api_version: str = "v1") -> None:
    job.jobs.patch(kind, name, {"metadata": {"labels": {LABEL_JOB: None}}}, api_version)


def has_label(job: PlayedJob, kind: str, name: str, api_version: str = "v1") -> bool:
    return ((job.jobs.get(kind, name, api_version) or {"metadata": {}})["metadata"].get("labels") or {}).get(LABEL_JOB) == JOB


OF_A_GANG = [
    ("ConfigMap", "v1"), ("Service", "v1"), ("NetworkPolicy", "networking.k8s.io/v1"), ("StatefulSet", "apps/v1"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "api_version"), OF_A_GANG)
def test_an_object_of_a_running_gang_that_is_relabeled_or_deleted_comes_back_and_stops_no_pod(
    rig: Rig, kind: str, api_version: str
) -> None:
    with rig.job() as job:
        SCENARIOS["restart"].prepare(job)
        name = {"ConfigMap": run_of(job), "Service": f"{JOB}-headless"}.get(kind, JOB)
        pods, before = job.uids("Pod"), job.jobs.get(kind, name, api_version) or {}
        relabel(job, kind, name, api_version)
        job.until("it has its labels again", lambda: has_label(job, kind, name, api_version))
        if kind != "StatefulSet":  # whoever deletes that asks for its pods to go
            job.jobs.delete(kind, name, api_version)
            job.until("it is there again", lambda: has_label(job, kind, name, api_version))
        job.fail_and_start_again()
        job.until("the gang is heard", job.runs)
        after = job.jobs.get(kind, name, api_version) or {}
        assert after.get("data") == before.get("data")
        assert job.uids("Pod") == pods


def test_a_gang_whose_frozen_run_is_lost_while_nobody_leads_runs_on_and_starts_anew_when_it_is_told_to(rig: Rig) -> None:
    with rig.job() as job:
        SCENARIOS["restart"].prepare(job)
        pods, lost = job.uids("Pod"), run_of(job)
        rig.operator.kill()
        job.jobs.delete("ConfigMap", lost)
        with operator_process({**rig.settings, "LOCKSTEP_AGENT_IMAGE": "agent:2"}, rig.folder):
            job.until("status says so", lambda: job.jobs.condition(JOB, "Accepted").get("reason") == "FrozenRunLost")
            job.fail_and_start_again()
            job.until("the gang is heard", job.runs)
            assert job.uids("Pod") == pods
            job.jobs.change(JOB, suspend=True)
            job.until("suspended", lambda: is_suspended(job))
            assert job.jobs.job(JOB)["status"]["stop"]["save"] == "Saved"
            job.jobs.change(JOB, suspend=False)
            job.until("the new start runs", job.runs)
            assert run_of(job) != lost
        rig.operator.start()


def test_a_frozen_run_that_somebody_else_wrote_is_not_obeyed(rig: Rig) -> None:
    """Made while the job was suspended, by somebody who may write ConfigMaps: a pod template that is not the job's."""
    with rig.job() as job:
        SCENARIOS["resume"].prepare(job)
        forged = job.jobs.get("ConfigMap", run_of(job)) or {}
        true = dict(forged["data"])
        forged["data"]["template.json"] = true["template.json"].replace("agent:1", "agent:bad")
        forged["metadata"] = {key: forged["metadata"][key] for key in ("name", "labels", "ownerReferences", "annotations")}
        job.jobs.delete("ConfigMap", forged["metadata"]["name"])
        job.jobs.create(forged)
        SCENARIOS["resume"].act(job)
        job.until("resumed", job.runs)
        assert (job.jobs.get("ConfigMap", run_of(job)) or {})["data"] == true
        assert "agent:bad" not in str(job.jobs.get("StatefulSet", JOB, "apps/v1"))


def test_a_gang_whose_operator_lost_its_key_is_heard_and_its_next_start_has_a_secret_of_the_new_one(rig: Rig) -> None:
    with rig.job() as job:
        SCENARIOS["restart"].prepare(job)
        pods, before = job.uids("Pod"), job.jobs.key_secret(JOB)
        rig.operator.kill()
        Jobs(rig.api, SYSTEM).delete("Secret", "lockstep-operator-key")
        rig.operator.start()
        job.fail_and_start_again()
        job.until("the gang is heard", lambda: job.runs() and job.jobs.job(JOB)["status"]["attempts"] == job.attempt)
        assert "key was replaced" in job.jobs.condition(JOB, "Accepted")["message"]
        assert job.uids("Pod") == pods
        job.jobs.change(JOB, suspend=True)
        job.until("suspended", lambda: is_suspended(job))
        job.jobs.change(JOB, suspend=False)
        job.until("it runs again", job.runs)
        assert job.jobs.key_secret(JOB) != before
        job.until("nothing is amiss", lambda: "was replaced" not in job.jobs.condition(JOB, "Accepted")["message"])
