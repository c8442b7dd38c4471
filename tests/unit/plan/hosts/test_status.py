"""Status of a job on hosts: every state that its hosts and the coordinator's report can tell, and what is told of those that say
nothing.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from lockstep.api.objects import condition
from lockstep.plan.hosts.commits import merged_list
from lockstep.plan.hosts.facts import Folder, HostFacts, JobOnHost
from lockstep.plan.hosts.record import Coordinator, JobRecord
from lockstep.plan.hosts.status import complaints, host_job, next_steps, progress_known, seen_jobs, unkept_words, unread_jobs
from lockstep.plan.pages.why import Where, why
from lockstep_gang.contract.report import NodeReport, RankCount, Report, Save, State, StopReport, TrainerReport, report_body
from lockstep_gang.contract.run import JobIdentity

NOW = 1_700_000_000.0
AGAIN = "--cluster lab"
AGAIN_WORDS = "start the script again (it goes on if it looks for its own checkpoints; transformers: resume_from_checkpoint)"
RECORD = JobRecord(
    job={"metadata": {"name": "x", "namespace": "hosts", "uid": "u1", "creationTimestamp": "2026-01-02T00:00:00Z"},
        "spec": {"nodes": 2, "script": {"path": "a.py"}}},
    cluster="lab", hosts=("lab0", "lab1"), ranks=(1, 1), node=0, workspace="/ws", datasets="/d", supervised=False, command=("python3",),
        environment={},
    coordinator=Coordinator("10.0.0.1", 29400),
)  # fmt: skip


def report(state: State = State.RUNNING, *, uid: str = "u1", ready: int = 2, **changes: Any) -> dict[str, Any]:
    plain = Report(
        job=JobIdentity("x", "hosts", uid), pod="", sequence=1, attempt=1, restarts=0, state=state, message="as told",
        nodes=(NodeReport(0, True, 1), NodeReport(1, True, 1)), ranks=RankCount(2, ready), trainer=TrainerReport(step=7),
    )  # fmt: skip
    return dict(json.loads(report_body(replace(plain, **changes))))


def host(name: str, job: JobOnHost | None) -> HostFacts:
    folder = Folder("/ws", 1)
    return HostFacts(name, "ada", "/home/ada", NOW, (3, 11), folder, folder, jobs={} if job is None else {"x": job})


ACTIVE = JobOnHost(record=RECORD, unit="active")
LEADING = replace(ACTIVE, report=report(), report_seconds=1.0)
ENDED = JobOnHost(record=RECORD, unit="inactive")
AWAY = {"lab1": "host lab1 can't be reached"}


def told(first: JobOnHost | None, second: JobOnHost | None, problems: dict[str, str] | None = None) -> tuple[str, str, str]:
    """Reason, status and message of the job's Progressing condition."""
    problems = problems or {}
    answers = {name: host(name, job) for name, job in (("lab0", first), ("lab1", second)) if name not in problems}
    observed = host_job(seen_jobs(answers, problems)["x"], AGAIN, NOW)
    one = condition(observed.status, "Progressing")
    return one["reason"], one["status"], one["message"]


def test_the_newest_stop_is_told_with_its_time() -> None:
    stop = StopReport(attempt=1, time="2026-01-02T01:00:00Z", save=Save.SAVED, message="saved at step 7", step=7)
    stopped = replace(ENDED, report=report(stop=stop), report_seconds=1.0)
    observed = host_job(seen_jobs({"lab0": host("lab0", stopped), "lab1": host("lab1", ENDED)}, {})["x"], AGAIN, NOW)
    assert (observed.status["stop"]["time"], observed.status["stop"]["save"]) == ("2026-01-02T01:00:00Z", "Saved")


@pytest.mark.parametrize(
    ("first", "second", "problems", "expected"),
    [
        (LEADING, ACTIVE, {}, ("Running", "True", "all ranks run")),
        (ACTIVE, ACTIVE, {}, ("Starting", "True", "its agents run on 2 of 2 hosts; node 0 has not reported yet")),
        (replace(LEADING, report=report(State.STARTING, ready=1)), ACTIVE, {}, ("Starting", "True", "1 of 2 ranks ready: as told")),
        (replace(LEADING, report_seconds=90.0), ACTIVE, {}, ("NoReport", "Unknown", "node 0 has not reported for 1m30s; its agent runs")),
        (LEADING, None, AWAY, ("Running", "True", "all ranks run; host lab1 can't be reached")),
        (replace(LEADING, report=report(State.WAITING, ready=0)), None, AWAY,
            ("HostAway", "False", "host lab1 can't be reached; the job goes on when it is back")),
        (replace(ENDED, stopped=True), replace(ENDED, stopped=True), {},
            ("Suspended", "False", f"stopped as asked; to {AGAIN_WORDS}: lockstep resume x --cluster lab")),
        (replace(ENDED, stopped=True, newest_step=4, newest_time=1.0), replace(ENDED, stopped=True), {},
            ("Suspended", "False", "stopped as asked; to go on from the last checkpoint: lockstep resume x --cluster lab")),
        (replace(ENDED, stopped=True), ACTIVE, {},
            ("Stopping", "False", "the stop has not reached host lab1: lockstep stop x --cluster lab")),
        (replace(LEADING, stopped=True), replace(ENDED, stopped=True), {}, ("Stopping", "False", "ranks save and stop on host lab0")),
        (replace(ENDED, ended={"jobUid": "u1", "state": "Complete"}), ENDED, {}, ("Complete", "False", "the job is complete")),
        (replace(ENDED, ended={"jobUid": "u1", "state": "Failed", "message": "rank 1 died"}), ENDED, {},
            ("Failed", "False", "rank 1 died")),
        (replace(LEADING, retry=1, ended={"jobUid": "u1", "state": "Failed", "message": "old"}), ACTIVE, {},
            ("Running", "True", "all ranks run")),
        (replace(LEADING, ended={"jobUid": "earlier", "state": "Failed"}), ACTIVE, {}, ("Running", "True", "all ranks run")),
        (replace(ACTIVE, report=report(uid="earlier")), ACTIVE, {},
            ("Starting", "True", "its agents run on 2 of 2 hosts; node 0 has not reported yet")),
    ],
)  # fmt: skip
def test_the_state_is_told_in_one_word_and_a_sentence(
    first: JobOnHost, second: JobOnHost | None, problems: dict[str, str], expected: tuple[str, str, str]
) -> None:
    assert told(first, second, problems) == expected


def test_hosts_whose_agents_a_reboot_ends_are_named_with_the_reason() -> None:
    record = replace(RECORD, supervised=True, unkept="ada has no linger there")
    session = replace(ACTIVE, unit="", supervised=True, record=replace(record, node=1))
    assert told(LEADING, session) == ("Running", "True", "all ranks run; no reboot recovery on host lab1")
    answers = {"lab0": host("lab0", LEADING), "lab1": host("lab1", session)}
    seen = seen_jobs(answers, {})["x"]
    expected = "the job does not come back after a reboot of host lab1, since ada has no linger there"
    assert unkept_words(seen) == [expected] and expected in condition(host_job(seen, AGAIN, NOW).status, "NodesHealthy")["message"]
    assert told(replace(ENDED, record=record), session)[2].startswith(
        "the agent on host lab0 is not running (a session kept it, which a reboot ends)"
    )


def test_an_agent_that_ended_is_named_with_its_last_line() -> None:
    reason, _, message = told(replace(ACTIVE), replace(ENDED, exit_code=78, log=("a", "[lockstep] GPU 0 is taken", "")))
    assert reason == "AgentEnded"
    assert message.startswith("the agent on host lab1 ended with configuration: [lockstep] GPU 0 is taken; to start the script again (")


def test_a_start_that_broke_off_names_the_command_that_was_typed() -> None:
    annotations = {"lockstep.dev/typed": "lockstep run -f job.yaml --cluster lab"}
    typed = replace(RECORD, job={**RECORD.job, "metadata": {**RECORD.job["metadata"], "annotations": annotations}})
    observed = host_job(seen_jobs({"lab0": host("lab0", replace(ACTIVE, record=typed)), "lab1": host("lab1", None)}, {})["x"], AGAIN, NOW)
    assert (
        "removes the rest, lockstep run -f job.yaml --cluster lab starts it again" in condition(observed.status, "Progressing")["message"]
    )


def test_a_start_that_broke_off_is_told_as_such() -> None:
    older = replace(
        RECORD, job={**RECORD.job, "metadata": {**RECORD.job["metadata"], "uid": "u0", "creationTimestamp": "2026-01-01T00:00:00Z"}}
    )
    reason, _, message = told(ACTIVE, replace(ENDED, record=older))
    assert reason == "AgentEnded" and message.startswith("host lab1 has no files of this start: it broke off")


def test_files_that_cannot_be_read_on_a_host_are_told_and_their_job_is_not_lost() -> None:
    unread = JobOnHost(unit="active", problem="job.json: Permission denied")
    sentence = "host lab1: the files of job x there can't be read: job.json: Permission denied"
    assert told(LEADING, unread) == ("Running", "True", f"all ranks run; {sentence}")
    assert told(unread, ACTIVE)[:2] == ("Unreachable", "Unknown")
    answers = {"lab0": host("lab0", LEADING), "lab1": host("lab1", unread)}
    assert unread_jobs(answers) == [sentence]


def test_a_record_of_the_end_that_is_damaged_ends_nothing() -> None:
    damaged = replace(LEADING, ended={"jobUid": "u1", "state": "Failed", "retry": "x"})
    assert told(damaged, ACTIVE) == ("Running", "True", "all ranks run")


def test_nothing_is_called_failed_of_which_nobody_knows() -> None:
    both = {"lab0": "host lab0 can't be reached", **AWAY}
    commit = replace(ENDED, newest_step=40, newest_time=NOW - 60)
    assert told(None, commit, {"lab0": both["lab0"]})[:2] == ("Unreachable", "Unknown")
    assert told(None, commit, {"lab0": both["lab0"]})[2].startswith("host lab0 can't be reached; last known: the commit of step 40, at ")
    seen = seen_jobs({"lab0": host("lab0", LEADING), "lab1": host("lab1", ACTIVE)}, {})["x"]
    known = progress_known(host_job(seen, AGAIN, NOW).job, NOW)
    observed = host_job(replace(seen, jobs={}, problems=both, known=known), AGAIN, NOW)
    assert condition(observed.status, "Progressing")["message"].endswith("last known: Running, step 7, at 2023-11-14T22:13:20Z")
    answer = why(observed, (), NOW)
    assert (
        answer.state is Where.UNREACHABLE
        and not answer.is_well
        and next_steps(observed, Where.FAILED, AGAIN)[0].command == "lockstep retry x --cluster lab"
    )


@pytest.mark.parametrize(
    ("step", "commands"), [(7, ["logs x --cluster lab -f"]), (None, ["logs x --cluster lab -f", "stacks x --cluster lab"])]
)
def test_only_ranks_that_report_no_step_are_to_be_asked_where_they_are(step: int | None, commands: list[str]) -> None:
    leading = replace(LEADING, report=report(trainer=None if step is None else TrainerReport(step=step)))
    observed = host_job(seen_jobs({"lab0": host("lab0", leading), "lab1": host("lab1", ACTIVE)}, {})["x"], AGAIN, NOW)
    assert [one.command for one in next_steps(observed, Where.RUNNING, AGAIN)] == [f"lockstep {command}" for command in commands]


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (replace(LEADING, report_seconds=15.0), 0),
        (replace(LEADING, report_seconds=38.0), 1),
        (replace(LEADING, report_seconds=38.0, unit="inactive"), 0),
        (replace(LEADING, report_seconds=38.0, ended={"state": "Complete"}), 0),
        (ACTIVE, 0),
    ],
)
def test_a_folder_that_takes_no_writes_is_told_of_a_job_that_runs(first: JobOnHost, words: int) -> None:
    said = complaints(
        seen_jobs({"lab0": host("lab0", first), "lab1": host("lab1", replace(ACTIVE, report=report(), report_seconds=90.0))}, {})["x"]
    )
    assert len(said) == words
    assert not words or said[0].startswith("host lab0: nothing has been written to /ws/runs/x for 38 s: its file system takes no writes")


def test_a_folder_that_takes_no_writes_is_told_in_its_agent_s_own_words() -> None:
    why = "cannot write /ws/runs/x/gang/report.json (No space left on device: the file system /ws has 0 B of 1 GiB left: make room there)"
    first = replace(LEADING, report_seconds=38.0, log=("[lockstep] step", f"[lockstep] {why}", "[rank 0] step 7"))
    (said,) = complaints(seen_jobs({"lab0": host("lab0", first)}, {})["x"])
    assert said.startswith(f"host lab0: nothing has been written to /ws/runs/x for 38 s: {why}. A save waits")


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (["[lockstep] this agent can't start: /tmp: No space left on device"],
            ["host lab1: this agent can't start: /tmp: No space left on device"]),
        (["[lockstep] this agent can't start: /tmp: No space left on device", "[lockstep] attempt 2 starts; this log has …",
            "[rank 1] hello"], []),
        (["[lockstep] attempt 2 starts; this log has …", "[lockstep] nobody hears this node"], ["host lab1: nobody hears this node"]),
    ],
)  # fmt: skip
def test_an_agent_that_does_not_start_says_why_until_it_takes_part(log: list[str], said: list[str]) -> None:
    waiting = replace(LEADING, report=report(State.WAITING, ready=0))
    facts = {"lab0": host("lab0", waiting), "lab1": host("lab1", replace(ACTIVE, log=tuple(log)))}
    assert list(complaints(seen_jobs(facts, {})["x"])) == said


def test_the_newest_two_commits_are_kept_whatever_else_is() -> None:
    commit = {"attempt": 1, "folders": [], "onChain": True, "best": False, "kept": ["newest"], "problems": [], "shards": {}}
    commits = [{**commit, "name": f"step-{step}", "step": step} for step in range(4)]
    merged = merged_list({"lab0": {"commits": commits, "problems": []}}, {})["commits"]
    assert [(row["step"], row["kept"]) for row in merged] == [(3, ["newest"]), (2, ["newest"]), (1, []), (0, [])]
