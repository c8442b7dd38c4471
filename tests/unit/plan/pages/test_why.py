"""`lockstep why`: a sensible answer for every place a job can be in."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from lockstep.api.errors import ConfigError
from lockstep.api.objects import Object, condition, current_status
from lockstep.cli.main import app
from lockstep.plan.hosts.status import next_steps as hosts_steps
from lockstep.plan.observed import Observed, start_anew
from lockstep.plan.pages.remedies import NOT_AS_ASKED, REMEDIES, next_steps, remedy
from lockstep.plan.pages.table import Unheard
from lockstep.plan.pages.why import Answer, ClusterHome, Where, answer_page, cost, why
from lockstep.plan.reasons import Reason
from lockstep.plan.reconcile.reconcile import reconcile
from lockstep.plan.times import timestamp
from lockstep.platforms.local.backend import LocalBackend
from lockstep_gang.contract.report import Cause, CheckpointReport, Failure, Restart, State, TrainerReport, Unwritten, report_file_text
from lockstep_gang.contract.run import JobIdentity
from lockstep_gang.lifecycle.gang import new_gang
from lockstep_gang.lifecycle.start import without_folder
from lockstep_gang.lifecycle.summary import message_of
from unit.gang.cases import make_run
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, after, fresh, pod, report, running, settled
from unit.plan.reconcile.test_reconcile import waiting as pulling
from unit.plan.waiting.test_blocked import foreign, node, stuck

FAILURE = Failure(
    "rank 1 on node 1 exited with 1: ValueError: no", 1, 1, 1, None, "ValueError", ("Traceback", "ValueError: no"), Cause.USER_CODE, 47
)
RESTARTS = (
    Restart(1, "2026-01-01T00:00:00Z", replace(FAILURE, cause=Cause.FABRIC), 7, 13),
    Restart(2, "2026-01-01T01:00:00Z", FAILURE, 30, 38),
)


def asked(observed: Observed, *not_seen: str) -> Answer:
    return why(observed, not_seen, NOW + 1)


def failed(**spec: Any) -> Observed:
    observed = settled(report(), **spec)
    said = report(State.FAILED, ready=0, failure=FAILURE, history=RESTARTS)
    return after(observed, reconcile(observed, said, CONTEXT, NOW))


def test_a_failed_job_says_who_failed_first_what_it_cost_and_what_to_type() -> None:
    said = answer_page(asked(failed()))
    assert "x: Failed: rank 1 on node 1 exited with 1: ValueError: no" in said
    assert "first cause  rank 1 on node 1 (Node node-1), after step 47: UserCode (ValueError)\n" in said
    assert "last lines   Traceback\n             ValueError: no" in said
    assert "lost         2 failures (1 Fabric, 1 UserCode): 37 steps done again, 51s without training" in said
    assert (
        "next         lockstep retry x -n ns   # start the script again (it goes on if it looks for its own checkpoints; transformers:"
        " resume_from_checkpoint); the script failed: correct it first" in said
    )
    assert "lockstep why x -n ns --bundle x.tar.gz" in said


OF_ACCEPTED = list(REMEDIES)[: list(REMEDIES).index(Reason.PODS_NOT_CREATED)]
OF_NODES = (Reason.NODE_LOST, Reason.NODE_BOUND_VOLUME, Reason.NO_NODE_FREE, Reason.AGENT_CONNECTED)
OF_ENDS = (Reason.RANKS_FAILED, Reason.START_TIMEOUT, Reason.DEADLINE_EXCEEDED)
OTHERS = {
    Reason.SLOW_RANK: ("Straggling", "True"),
    Reason.SAVE_FAILED: ("SavesFailing", "True"),
    Reason.CHANGE_PENDING: ("Accepted", "True"),
}


def unwell_condition(reason: str) -> tuple[str, str]:
    """Type and status of the condition that says so."""
    if reason in OTHERS:
        return OTHERS[Reason(reason)]
    if reason in OF_ENDS:
        return "Failed", "True"
    if reason in OF_NODES or reason in NOT_AS_ASKED:
        return "NodesHealthy" if reason in OF_NODES else "FabricVerified", "False"
    kind = "Accepted" if reason in OF_ACCEPTED else "Progressing"
    return kind, "Unknown" if reason == Reason.NO_REPORT else "False"


@pytest.mark.parametrize("reason", REMEDIES, ids=str)
def test_each_reason_that_is_not_well_is_a_line_with_its_command(reason: str) -> None:
    kind, unwell = unwell_condition(reason)
    said = with_condition(kind, status=unwell, reason=reason, message="all; so it is")
    step = remedy(reason, "all; so it is", settled(report()))
    assert "so it is" in answer_page(said)
    assert step.command in [one.command for one in said.next]
    assert "so it is" not in answer_page(asked(settled(report())))


def with_condition(kind: str, **changes: str) -> Answer:
    well = settled(report())
    conditions = [{**one, **changes} if one["type"] == kind else one for one in well.status["conditions"]]
    return asked(replace(well, job={**well.job, "status": {**well.status, "conditions": conditions}}))


def test_held_pods_and_keys_that_were_made_anew_are_lines_with_a_command() -> None:
    assert "so it is" in answer_page(with_condition("Held", status="True", reason=Reason.HOLDING, message="so it is"))
    anew = "the job fits its cluster; the operator's key was replaced: `lockstep stop x -n ns`, then `lockstep resume x -n ns`"
    said = with_condition("Accepted", message=anew)
    assert "accepted     the operator's key was replaced" in answer_page(said) and said.next[0].command == "lockstep stop x -n ns"


def test_of_a_failed_rank_the_last_ten_lines_are_shown() -> None:
    failure = replace(FAILURE, last_lines=tuple(f"line {number}" for number in range(15)))
    said = asked(after(settled(report()), reconcile(settled(report()), report(State.FAILED, ready=0, failure=failure), CONTEXT, NOW)))
    assert said.last_lines == tuple(f"line {number}" for number in range(5, 15))


REFUSED_FOLDER = message_of(without_folder(new_gang(make_run()), "the run's folder /workspace/runs/x is in use by job x"), make_run())


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("preflight: spec.training.model.name: there is no folder /workspace/models/MODEL on node 0 (x-0): put it there, or correct the"
         " path", "training.model.name"),
        ("rank 0 on node 0 failed: ConfigError: training.model.name /workspace/models/m holds no config.json", "training.model.name"),
        (REFUSED_FOLDER, "storage"),
        ("preflight: spec.training.data.path: there is no file /datasets/train.jsonl on node 0 (x-0): put it there, or correct the path",
            ""),
    ],
)  # fmt: skip
def test_a_field_that_nobody_may_change_is_corrected_in_the_file_of_a_new_job(message: str, field: str) -> None:
    failure = replace(FAILURE, message=message, cause=Cause.CONFIGURATION)
    said = report(State.FAILED, ready=0, failure=failure)
    commands = [step.command for step in asked(after(settled(report()), reconcile(settled(report()), said, CONTEXT, NOW))).next]
    anew = ["lockstep delete x -n ns", "lockstep run -f FILE -n ns"] if field else []
    assert commands == [*anew, "lockstep retry x -n ns", "lockstep why x -n ns --bundle x.tar.gz"]


def test_steps_that_nothing_did_again_are_lost_or_still_to_be_done() -> None:
    open_entry = {"attempt": 2, "cause": "Hang", "lostSteps": 6}
    before = {"attempt": 1, "cause": "Fabric", "lostSteps": 7, "downtimeSeconds": 13}
    ended = {"conditions": [{"type": "Failed", "status": "True"}], "attempts": 2}
    assert cost({**ended, "restartHistory": [open_entry]}) == "1 failure (1 Hang): 6 steps lost"
    assert cost({"attempts": 2, "restartHistory": [open_entry]}) == "1 failure (1 Hang): 6 steps to be done again"
    both = "2 failures (1 Fabric, 1 Hang): 7 steps done again, 6 steps lost, 13s without training"
    assert cost({**ended, "restartHistory": [before, open_entry]}) == both


def test_a_job_that_runs_again_says_why_it_was_started_again() -> None:
    gone = Restart(1, "2026-01-01T00:00:00Z", Failure("node 1 lost its pod: it was deleted by hand", node=1, cause=Cause.NODE_LOST), 7, 13)
    observed = settled(report(trainer=TrainerReport("Step", 47, 120, 7300)))
    answer = asked(after(observed, reconcile(observed, report(history=(gone,)), CONTEXT, NOW)))
    line = "attempt 1 ended at 2026-01-01T00:00:00Z, node 1: NodeLost: node 1 lost its pod: it was deleted by hand"
    assert (answer.state, answer.restarted) == ("Running", line)
    assert f"restarted    {line}\nlost         1 failure (1 NodeLost): 7 steps done again" in answer_page(answer)
    assert not asked(failed()).restarted


@pytest.mark.parametrize("home", [None, ClusterHome("local", "ns"), ClusterHome("local", "lockstep")])
def test_a_job_in_another_namespace_than_its_cluster_s_is_moved_before_an_account_is_made_for_it(home: ClusterHome | None) -> None:
    observed = replace(fresh(), service_accounts=frozenset())
    answer = why(after(observed, reconcile(observed, None, CONTEXT, NOW)), (), NOW, home=home)
    account = "kubectl create serviceaccount ml-dev-sa -n ns"
    if home is None or home.namespace == "ns":
        assert answer.next[0].command == account and answer.summary.startswith("service account ml-dev-sa does not exist")
        return
    assert answer.summary.startswith("cluster local's jobs run in namespace lockstep: was -n lockstep forgotten? service account ml-dev-sa")
    assert [step.command for step in answer.next[:3]] == ["lockstep delete x -n ns", "lockstep run -f FILE -n lockstep", account]


def test_a_job_that_runs_on_without_its_cluster_says_that_it_could_not_start_anew() -> None:
    observed = replace(gets_on(), profiles=())
    answer = why(after(observed, reconcile(observed, report(), CONTEXT, NOW)), (), NOW)
    assert answer.state == "Running"
    assert "refused      spec.cluster is not set and no TrainingCluster" in answer_page(answer)
    assert answer.next[0].command == "lockstep cluster list"


def test_what_keeps_a_restart_from_its_pods_is_said_and_not_only_that_it_restarts() -> None:
    pulls = pulling("ImagePullBackOff", "manifest unknown: not found", node=1, image="i:1")
    observed = replace(settled(report()), pods=(pod(0), pulls))
    answer = asked(after(observed, reconcile(observed, report(State.BACKING_OFF, ready=0, failure=FAILURE), CONTEXT, NOW)))
    assert (answer.state, "image i:1 of container trainer" in answer.summary) == ("Restarting", True)
    assert answer.next[0].command.startswith("kubectl patch tj x -n ns")
    assert "ValueError" in answer.first_cause


def test_where_nobody_keeps_the_status_up_to_date_doctor_comes_first() -> None:
    unheard = Unheard("2026-01-01T00:00:00Z", "no operator has led")
    assert why(gets_on(), (), NOW, unheard=unheard).next[0].command == "lockstep doctor -n ns"
    assert why(complete(), (), NOW, unheard=unheard).next[0].command == "lockstep describe x -n ns"


def test_a_held_job_is_looked_into_first() -> None:
    answer = asked(failed(restart={"holdOnFailureSeconds": 600}))
    assert answer.next[0].command == "kubectl exec -it x-1 -n ns -- sh"
    assert "stay until" in answer.held
    assert not asked(failed()).held


def refused() -> Observed:
    observed = replace(fresh(), profiles=())
    return after(observed, reconcile(observed, None, CONTEXT, NOW))


def suspended() -> Observed:
    observed = fresh(suspend=True)
    return after(observed, reconcile(observed, None, CONTEXT, NOW))


def gets_on() -> Observed:
    commit = CheckpointReport(40, "/workspace/runs/x/checkpoints/step-40.a1", "2026-01-01T00:00:00Z")
    return settled(report(trainer=TrainerReport("Step", 47, 120, 7300), checkpoint=commit))


def waiting() -> Observed:
    observed = replace(running(), pods=(pod(0), stuck(1)), nodes=(node("a"),), others=(foreign("dev-0", "a", 8),))
    return after(observed, reconcile(replace(observed, others=()), None, CONTEXT, NOW))


def silent() -> Observed:
    observed = settled(report())
    return after(observed, reconcile(observed, report(), CONTEXT, NOW + 62))


def complete() -> Observed:
    observed = settled(report())
    return after(observed, reconcile(observed, report(State.COMPLETE, ready=0), CONTEXT, NOW))


def partitioned() -> Observed:
    observed = settled(report())
    return after(observed, reconcile(observed, report(unheard="node 1 (x-1) has not been heard since 12:00:05 UTC"), CONTEXT, NOW))


def restarting() -> Observed:
    observed = settled(report())
    return after(observed, reconcile(observed, report(State.BACKING_OFF, ready=0, failure=FAILURE), CONTEXT, NOW))


@pytest.mark.parametrize(
    ("observed", "state", "well", "says", "command"),
    [
        (fresh(), "Unseen", False, "the operator has not looked at it yet", "lockstep doctor -n ns"),
        (refused(), "Refused", False, "no TrainingCluster is annotated", "lockstep cluster list"),
        (suspended(), "Suspended", True, "no pods", "lockstep resume x -n ns"),
        (settled(), "Starting", True, "all pods run", "lockstep logs x -n ns -f"),
        (gets_on(), "Running", True, "step 47 of 120, 2h1m to go, attempt 1; saved up to step 40", "lockstep logs x -n ns -f"),
        (waiting(), "Waiting", False, "nvidia.com/gpu is in use on node a: Pod ml/dev-0 holds 8 (kubectl delete pod dev-0 -n ml)",
            "lockstep describe x -n ns"),
        (silent(), "Silent", False, "has not reported", "kubectl logs x-0 -n ns --tail 50"),
        (partitioned(), "NodeNotHeard", False, "node 1 (x-1) has not been heard", "kubectl get pods -n ns -l lockstep.dev/job=x -o wide"),
        (restarting(), "Restarting", True, "ValueError: no", "lockstep logs x -n ns -f"),
        (complete(), "Complete", True, "every rank ended well", "lockstep describe x -n ns"),
        (failed(), "Failed", False, "ValueError", "lockstep retry x -n ns"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalpha() else "",
)  # fmt: skip
def test_every_place_a_job_can_be_in_has_its_answer(observed: Observed, state: str, well: bool, says: str, command: str) -> None:
    answer = asked(observed)
    assert (answer.state, answer.is_well, answer.next[0].command) == (state, well, command)
    assert says in answer.summary
    assert json.loads(json.dumps(answer.as_json()))["state"] == state


def test_a_running_job_says_that_some_of_its_ranks_have_ended() -> None:
    observed = running()
    some = after(observed, reconcile(observed, report(ready=1), CONTEXT, NOW))
    assert (asked(some).state, asked(some).summary) == ("Running", "1 of 2 ranks ready: all ranks run")


def test_of_ranks_that_tell_no_step_it_is_said_how_to_ask_them() -> None:
    observed = settled(report(trainer=TrainerReport("Load")))
    silent_script = after(observed, reconcile(observed, report(trainer=TrainerReport("Load")), CONTEXT, NOW))
    assert asked(silent_script).state == "Running"
    assert [step.command for step in asked(silent_script).next] == ["lockstep logs x -n ns -f", "lockstep stacks x -n ns"]
    assert [step.command for step in asked(gets_on()).next] == ["lockstep logs x -n ns -f"]


def test_why_no_operator_works_in_the_namespace_is_said_as_long_as_that_matters() -> None:
    reason = "the operator works in a only"
    assert why(fresh(), (), NOW, reason).summary == reason
    assert reason in why(gets_on(), (), NOW, reason).not_seen[0]
    assert why(complete(), (), NOW, reason).not_seen == ()


def test_what_the_asker_may_not_see_is_said() -> None:
    assert "not seen     Nodes of the cluster: your account may not list them" in answer_page(
        asked(gets_on(), "Nodes of the cluster: your account may not list them")
    )


def write_run(root: Path, end: Object | None, **last: Any) -> None:
    folder = root / "workspace" / "runs" / "x" / "gang"
    folder.mkdir(parents=True)
    failure = {"message": "rank 1 on node 1 exited with 1", "rank": 1, "node": 1, "exitCode": 1, "cause": "UserCode", "step": 3}
    restart = {"attempt": 1, "failed": "2026-01-01T00:00:00Z", "failure": failure, "lostSteps": 3, "downtimeSeconds": None}
    record = {"attempt": 1, "jobUid": "u", "restarts": 0, "started": "2026-01-01T00:00:00Z", "checkpoint": None}
    earlier = {**record, "jobUid": "before"}
    own = {**record, "attempt": 2, "outcome": "Failed", "restart": restart, **last}
    (folder / "attempts.jsonl").write_text(f"{json.dumps(earlier)}\n{json.dumps(own)}\n")
    if end is not None:
        (folder / "end.json").write_text(json.dumps({"jobUid": "u", "failure": failure, "message": failure["message"], **end}))


def test_a_local_runs_folder_is_asked(tmp_path: Path) -> None:
    write_run(tmp_path, {"state": "Failed"})
    done = CliRunner().invoke(app, ["why", "x", "--cluster", str(tmp_path)])
    assert done.exit_code == 1
    assert "x: Failed: rank 1 on node 1 exited with 1" in done.output
    assert "first cause  rank 1 on node 1, after step 3: UserCode (exit code 1)" in done.output
    assert f"next         lockstep run -f FILE --cluster {tmp_path}" in done.output


def test_what_to_type_next_names_the_workspace_of_a_local_run(tmp_path: Path) -> None:
    workspace = tmp_path / "my data"
    write_run(workspace, {"state": "Failed"})
    done = CliRunner().invoke(app, ["why", "x", "--cluster", str(workspace)])
    assert f"next         lockstep run -f FILE --cluster '{workspace}'   # start it again; the script failed" in done.output


SCRIPT_AGAIN = "start the script again (it goes on if it looks for its own checkpoints; transformers: resume_from_checkpoint)"
TRAINING_AGAIN = "start it again (at step 0, unless it finds a checkpoint)"
GO_ON = "go on from the last checkpoint"


@pytest.mark.parametrize(
    ("run", "commit", "words"),
    [
        ({"command": ["python3", "train.py"]}, None, SCRIPT_AGAIN),
        ({"command": ["python3", "train.py"]}, {"step": 20}, GO_ON),
        ({"command": ["python3", "-m", "lockstep_train"], "training": {"model": {"name": "m"}}}, None, TRAINING_AGAIN),
        ({"command": ["python3", "-m", "lockstep_train"], "training": {"model": {"name": "m"}}}, {"step": 20}, GO_ON),
    ],
)
@pytest.mark.parametrize("outcome", ["Stopped", None])
def test_a_local_run_names_a_checkpoint_only_where_one_is_known_and_the_command_that_was_typed(
    tmp_path: Path, run: Object, commit: Object | None, words: str, outcome: str | None
) -> None:
    write_run(tmp_path, None, outcome=outcome, restart=None, checkpoint=commit)
    folder = tmp_path / "workspace/runs/x"
    (folder / "logs/output").mkdir(parents=True)
    (folder / "logs/output/run.json").write_text(json.dumps({"nodes": 2, "job": {"uid": "u"}, **run}))
    typed = "lockstep run -f 'my job.yaml' --local"
    (folder / "local.lock").write_text(f"1\n{typed}\n")
    said = LocalBackend(tmp_path).job("x").answer(None)
    assert said.summary.endswith(f"; to {words}: {typed}")
    assert [(step.command, step.what) for step in said.next] == [(typed, words)]


@pytest.mark.parametrize(
    ("spec", "commit", "words"),
    [
        ({}, {}, "start it again"),
        ({"script": {"path": "a.py"}}, {}, SCRIPT_AGAIN),
        ({"training": {"model": {}}}, {}, TRAINING_AGAIN),
        ({"script": {"module": "a"}}, {"lastCommittedStep": 0}, GO_ON),
    ],
)
def test_every_word_about_a_stopped_or_failed_job_says_what_the_next_start_does(spec: Object, commit: Object, words: str) -> None:
    def of(reason: str) -> Observed:
        told = [{"type": kind, "status": "True", "reason": reason, "message": "m"} for kind in ("Failed", "Progressing")]
        return Observed(
            job={
                "metadata": {"name": "x", "namespace": "ns", "uid": "u"},
                "spec": spec,
                "status": {"checkpoint": commit, "conditions": told},
            }
        )

    job = of("Failed").job
    raised = current_status({**job, "spec": {**spec, "restart": {"retry": 1}}})
    texts = [
        next_steps(of("Failed"), "Failed", held=False)[0].what,
        next_steps(of("DeadlineExceeded"), "Failed", held=False)[0].what,
        next_steps(of("Suspended"), "Suspended", held=False)[0].what,
        hosts_steps(of("Failed"), Where.FAILED, "--cluster lab")[0].what,
        hosts_steps(of("Suspended"), Where.SUSPENDED, "--cluster lab")[0].what,
        condition(raised, "Progressing")["message"],
        start_anew(of("Suspended")),
    ]
    assert [text for text in texts if words not in text or (words != GO_ON and re.search("last (checkpoint|commit)", text))] == []


def test_a_local_run_whose_process_is_gone_or_is_somebody_else_s_is_stopped_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, None, outcome=None, restart=None)
    ended = subprocess.Popen(["true"])
    ended.wait()
    with (tmp_path / "workspace/runs/x/local.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as agents hold it that outlive the command
        lock.write(f"{ended.pid}\nlockstep run -f job.yaml --local\n")
        lock.flush()
        job = LocalBackend(tmp_path).job("x")
        assert job.suspend() is False

        def refuse(*_: int) -> None:
            raise PermissionError

        monkeypatch.setattr("os.kill", refuse)
        with pytest.raises(ConfigError, match="is another user's: ask them to stop it"):
            job.suspend()


@pytest.mark.parametrize(
    ("age", "free", "changes", "says"),
    [
        (0, 0, {}, "Running: all ranks run, attempt 1"),
        (0, 0, {"state": State.BACKING_OFF}, "Starting: restart 1 of all ranks\nnext         lockstep logs x --cluster"),
        (
            60,
            0,
            {},
            "Silent: node 0 has not written {} since {}: the file system / has 0 B of 64 B left: make room there, or enlarge it. Its",
        ),
        (60, 9, {}, "Silent: node 0 has not written {} since {}. Its process runs: its output says what can't be written"),
        (
            0,
            0,
            {"unwritten": Unwritten("cannot write the record", "T")},
            "RecordUnwritten: cannot write the record; since T this holds up the next start",
        ),
    ],
)
def test_a_local_run_that_restarts_or_can_t_write_its_report_is_not_called_running(
    age: int, free: int, changes: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, None, outcome=None, restart=None)
    room = SimpleNamespace(f_files=9, f_favail=9, f_bavail=free, f_blocks=64, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    monkeypatch.setattr(Path, "is_mount", lambda path: path == Path("/"))
    path = tmp_path / "workspace/runs/x/gang/report.json"
    written = replace(report(**changes).report, job=JobIdentity("x", "local", "u"))
    path.write_text(report_file_text(written, "2026-01-01T00:00:00Z"))
    os.utime(path, (at := time.time() - age, at))
    with (tmp_path / "workspace/runs/x/local.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(str(os.getpid()))
        lock.flush()
        done = CliRunner().invoke(app, ["why", "x", "--cluster", str(tmp_path)])
        assert not asyncio.run((job := LocalBackend(tmp_path).job("x")).is_over(print)), "its log is followed"
    assert asyncio.run(job.is_over(print))
    assert f"x: {says.format(path, timestamp(at))}" in done.output
    assert (f"df -h {tmp_path}/workspace/runs/x" in done.output) is says.startswith(("Silent", "RecordUnwritten"))


def test_a_local_run_whose_process_is_gone_is_not_called_running(tmp_path: Path) -> None:
    write_run(tmp_path, None, outcome=None, restart=None)
    done = CliRunner().invoke(app, ["why", "x", "--cluster", str(tmp_path), "-o", "json"])
    assert done.exit_code == 1
    assert json.loads(done.output)["state"] == "Silent"
    assert "ended without a report" in json.loads(done.output)["summary"]


@pytest.mark.parametrize(
    ("message", "exception", "advice"),
    [
        ("node 1 ran out of host memory: the kernel killed its container at its limit of 4Gi (OOMKilled)", None, "resources.limits.memory"),
        ("rank 1 on node 1 exited with 1: RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", "RuntimeError",
            "resources.limits.memory"),
        ("rank 1 on node 1 exited with 1: MemoryError", "MemoryError", "resources.limits.memory"),
        ("rank 1 on node 1 exited with 1: _ArrayMemoryError: Unable to allocate 2.00 EiB", "_ArrayMemoryError", "resources.limits.memory"),
        ("rank 1 on node 1 was ended by SIGABRT: bad_alloc: std::bad_alloc", "bad_alloc", "resources.limits.memory"),
        ("rank 1 on node 1 exited with 1: OSError: '/w/x'; raise the cluster's shm_size, or use fewer workers", "OSError",
            "fewer data loader workers"),
        ("rank 1 on node 1 was ended by SIGBUS; the file system /dev/shm has 0 B of 1 MiB left: raise it", None,
            "shared memory was full: do what the message says"),
        ("rank 1 on node 1 exited with 77: OutOfMemoryError: CUDA out of memory.", "OutOfMemoryError", "microBatchSize"),
    ],
)  # fmt: skip
def test_the_advice_for_memory_is_for_the_memory_that_was_short(message: str, exception: str | None, advice: str) -> None:
    observed = settled(report())
    failure = Failure(message, node=1, exception=exception, cause=Cause.OUT_OF_MEMORY)
    answer = asked(after(observed, reconcile(observed, report(State.FAILED, ready=0, failure=failure), CONTEXT, NOW)))
    (again,) = [step.what for step in answer.next if step.command.startswith("lockstep retry")]
    assert advice in again and ("microBatchSize" in again) == (advice == "microBatchSize")
