"""The worst status that a job can have: what a gang of any size reports, in texts of any kind, is taken by the API server and small beside
its job.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from functools import cache

import jsonschema
import pytest
from pydantic import ValidationError

from lockstep.api.crd import training_job_crd
from lockstep.api.objects import Object
from lockstep.api.preflightstatus import PreflightFinding, PreflightStatus
from lockstep.api.status import ExcludedNode, TrainingJobStatus
from lockstep.plan.observed import Observed, ReceivedReport
from lockstep.plan.reconcile import status as status_module
from lockstep.plan.reconcile import status as statuses
from lockstep.plan.reconcile.events import JobEvent, SentEvents, events_between, worth_sending
from lockstep.plan.reconcile.reconcile import reconcile
from lockstep.plan.reconcile.status import fitted, stored_bytes
from lockstep.platforms.operator.memory.objects import BYTES_MAX, StoredObject
from lockstep_gang.contract.report import Failure, NodeReport, RankCount, Report, State, parse_report
from lockstep_spec.codec import to_json
from recorded.recorder import filled
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, after, fresh, pod, settled
from unit.plan.reconcile.test_reconcile import report as a_report

RANKS_MAX = 8192
MESSAGE_BYTES = 1024
STATUS_BYTES_MAX = 256 << 10

NODES = 1024
STATUS = jsonschema.Draft202012Validator(training_job_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"])
TEXTS = {"plain": "x", "html": "<", "quotes": '"', "two bytes": "é", "three bytes": "語", "four bytes": "\U0001f980"}
TIME = "2027-01-15T08:00:00Z"


def worst(text: str, state: State, number: int = 3, items: int = 40, *, times: bool = True) -> ReceivedReport:
    """What the coordinator of 1,024 nodes could say at most, and more."""
    honest = a_report().report
    report = filled(Report, text, number, items)
    nodes = tuple(NodeReport(node, True, 8) for node in range(NODES))
    report = replace(
        report,
        job=honest.job,
        format=honest.format,
        pod="x-0",
        attempt=7,
        state=state,
        nodes=nodes,
        ranks=RankCount(RANKS_MAX, 5),
        order=tuple(range(NODES)),
    )
    if times:
        report = replace(
            report,
            history=tuple(replace(entry, failed=TIME) for entry in report.history),
            checkpoint=replace(report.checkpoint, time=TIME),
            preflight=replace(report.preflight, time=TIME),
            stop=replace(report.stop, time=TIME),
        )
    return ReceivedReport(report, "pod-0", NOW)


@cache
def gang(text: str) -> Observed:
    """A job of 1,024 nodes whose pods, Nodes and status have long names and words of anybody."""
    observed = fresh(nodes=NODES, gpusPerNode=8)
    observed = after(observed, reconcile(observed, None, CONTEXT, NOW))
    name = "n" * 240
    pods = tuple(pod(node, spec={"nodeName": f"{name}-{node}", "containers": []}) for node in range(NODES))
    excluded = [{"name": f"{name}-{node}", "time": TIME, "message": text[:1024]} for node in range(16)]
    return replace(observed, pods=pods, job={**observed.job, "status": {**observed.status, "excludedNodes": excluded}})


def taken_by_the_api_server(status: Object) -> None:
    STATUS.validate(status)
    for time in re.findall(r'"\w*[tT]ime": "([^"]*)"', json.dumps(status)):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", time), time


@pytest.mark.parametrize("state", [State.RUNNING, State.BACKING_OFF, State.FAILED, State.COMPLETE])
@pytest.mark.parametrize("character", TEXTS.values(), ids=TEXTS)
def test_the_largest_status_of_the_largest_gang_is_bounded_and_valid(character: str, state: State) -> None:
    observed = gang(character * 5000)
    plan = reconcile(observed, worst(character * 5000, state), CONTEXT, NOW + 20)
    assert plan.status is not None
    taken_by_the_api_server(plan.status)
    size = stored_bytes(plan.status)
    print(f"{size} bytes")
    assert 100_000 < size <= STATUS_BYTES_MAX == 256 << 10
    assert [node["name"] for node in plan.status["excludedNodes"]] == [node["name"] for node in observed.status["excludedNodes"]]
    again = reconcile(after(observed, plan), worst(character * 5000, state), CONTEXT, NOW + 21)
    assert again.status is None, "a status that was cut is not written again and again"


@pytest.mark.parametrize("number", [-1, -(2**70), 2**70])
@pytest.mark.parametrize("text", ["", "yesterday", "\u202e\x1b[2J\n"])
def test_what_no_schema_allows_is_left_out_and_the_rest_is_written(text: str, number: int) -> None:
    received = worst(text, State.RUNNING, number, items=3, times=False)
    received = replace(received, report=parse_report(json.dumps(to_json(received.report)).encode()))
    plan = reconcile(gang("x"), received, CONTEXT, NOW + 20)
    assert plan.status is not None
    taken_by_the_api_server(plan.status)
    assert len(plan.status["conditions"]) == 14 and plan.status["ranks"]["ready"] == 5


def test_an_honest_status_is_written_as_it_is() -> None:
    plan = reconcile(gang("x"), worst("a line", State.RUNNING, items=3), CONTEXT, NOW + 20)
    assert plan.status is not None and plan.status["failure"]["lastLines"] == ["a line"] * 3
    assert fitted(plan.status) == plan.status


@pytest.mark.parametrize("character", TEXTS.values(), ids=TEXTS)
def test_an_event_has_at_most_1024_bytes_on_one_line(character: str) -> None:
    observed = gang("x")
    plan = reconcile(observed, worst(character * 5000, State.BACKING_OFF), CONTEXT, NOW + 20)
    assert plan.status is not None
    long = JobEvent("Warning", "Anything", character * 5000 + "\n")
    events = (*plan.events, *events_between(observed.status, plan.status), *worth_sending(SentEvents(), (long,), NOW)[1])
    assert len(events) > 3
    for event in events:
        assert len(event.message.encode()) <= MESSAGE_BYTES == 1024 and event.message.isprintable()


def test_a_large_status_makes_no_job_unreadable() -> None:
    plan = reconcile(gang("x"), worst("語" * 5000, State.COMPLETE), CONTEXT, NOW + 20)
    item = copy.deepcopy(gang("x").job)
    item["spec"]["env"] = [{"name": "A", "value": "x" * (BYTES_MAX["TrainingJob"] - 4096)}]
    item["status"] = plan.status
    kept = StoredObject("TrainingJob", item).item
    assert kept["spec"] == item["spec"] and kept["status"] == plan.status and "unreadable" not in kept


@pytest.mark.parametrize("extra", [0, BYTES_MAX["TrainingJob"]])
def test_what_a_job_s_status_says_is_known_however_large_its_spec_or_its_status_is(extra: int) -> None:
    item = copy.deepcopy(gang("x").job)
    ended = {
        "type": "Complete",
        "status": "True",
        "reason": "Complete",
        "message": "é" * 4096,
        "lastTransitionTime": TIME,
        "observedGeneration": 1,
    }
    item["spec"]["env"] = "x" * extra
    item["status"] = {"conditions": [ended], "unknown": "x" * BYTES_MAX["TrainingJob"]}
    kept = StoredObject("TrainingJob", item).item
    assert kept["status"] == {"conditions": [ended]}
    assert ("unreadable" in kept) == bool(extra)


def test_a_status_is_fitted_without_reading_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts of fields take a second of a busy machine's time, in which an operator that has just begun would do nothing else."""
    statuses._schema.cache_clear()
    monkeypatch.setattr("inspect.getsource", lambda _: pytest.fail("sources were read"))
    assert fitted({"conditions": []}) == {"conditions": []}


def test_a_preflight_s_status_has_as_many_findings_as_a_report() -> None:
    finding = {"check": "space", "severity": "Warning", "message": "m", "fix": "f", "node": 0}

    def status(count: int) -> object:
        return PreflightStatus(
            time="2026-01-01T00:00:00Z", ok=True, checks=1, nodes=1, milliseconds=1, findings=[PreflightFinding(**finding)] * count
        )

    assert status(20)
    with pytest.raises(ValidationError):
        status(21)


def test_a_status_names_at_most_sixteen_nodes_that_are_bad_for_the_job() -> None:
    node = ExcludedNode(name="n", message="m", time="2026-01-01T00:00:00Z")
    assert TrainingJobStatus(excluded_nodes=[node] * 16)
    with pytest.raises(ValidationError):
        TrainingJobStatus(excluded_nodes=[node] * 17)


@pytest.mark.parametrize(("number", "told"), [(2**63 - 1, 2**63 - 1), (2**63, None), (-1, None)])
def test_a_count_that_the_api_server_does_not_take_is_left_out(number: int, told: int | None) -> None:
    assert status_module._count(number) == told


def test_a_status_has_the_last_twenty_lines_of_the_rank_that_failed() -> None:
    failure = Failure("rank 1 on node 1 exited with 1", 1, 1, 1, last_lines=tuple(f"line {number}" for number in range(30)))
    plan = reconcile(settled(a_report()), a_report(State.FAILED, ready=0, failure=failure), CONTEXT, NOW)
    assert plan.status is not None and plan.status["failure"]["lastLines"] == [f"line {number}" for number in range(10, 30)]
