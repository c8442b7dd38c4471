"""Whatever stands in a stored status or comes in a report: it is read or left out, and what is written is what the API server takes."""

from __future__ import annotations

import random
from dataclasses import fields, is_dataclass, replace
from typing import Any

import jsonschema
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from lockstep.api.crd import training_job_crd
from lockstep.api.objects import Object
from lockstep.plan.observed import ReceivedReport
from lockstep.plan.reconcile.reconcile import reconcile
from lockstep.plan.reconcile.status import fitted, readable
from lockstep.platforms.operator.memory.inventory import Inventory
from lockstep.platforms.operator.metrics import Jobs, Metrics
from lockstep_gang.contract.fabric import DifferingRanks, FabricReason, FabricReport, Verified
from lockstep_gang.contract.preflight import Bandwidth, Finding, PreflightReport
from lockstep_gang.contract.report import (
    Cause,
    CheckpointReport,
    FailedSaves,
    Failure,
    Goodput,
    Loss,
    NodeReport,
    RankCount,
    Report,
    Restart,
    Save,
    State,
    StopReport,
    Straggler,
    TrainerReport,
    parse_report,
    report_body,
)
from lockstep_gang.contract.run import JobIdentity
from lockstep_spec.choices import Severity
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, UID, running

SCHEMA = jsonschema.Draft202012Validator(training_job_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"])
TIME = "2026-01-01T00:00:00Z"
CONDITION = {
    "type": "Progressing",
    "status": "True",
    "reason": "Running",
    "message": "",
    "lastTransitionTime": TIME,
    "observedGeneration": 1,
}
FULL: Object = {
    "observedGeneration": 3, "conditions": [CONDITION], "nodes": 2, "attempts": 1, "startTime": TIME,
    "checkpoint": {"lastCommittedStep": 5, "lastCommitTime": TIME},
        "trainer": {"step": 5, "metrics": [{"name": "loss", "value": "1"}], "lastUpdateTime": TIME},
    "restartHistory": [{"attempt": 1, "time": TIME, "cause": "Hang", "message": "m", "lostSteps": 1}],
        "active": {"since": TIME, "earlierSeconds": 1},
    "placement": {"placed": 1, "wanted": 2, "since": TIME, "releaseTime": TIME},
        "goodput": {"percentage": 50, "losses": [{"cause": "Hang", "seconds": 1, "gpuSeconds": 1}]},
    "ranks": {"desired": 2, "ready": 2}, "stop": {"time": TIME, "attempt": 1, "save": "Saved"},
}  # fmt: skip
NONSENSE = (-1, 2**63, -(2**70), True, "", "yes", "x" * 5000, [], {}, [[]], {"a": 1}, "0000-01-01T00:00:00Z", "2026-01-01T00:00:00+99:99",
    "2026-13-01T00:00:00Z", "2026-W01-1T00:00:00Z", 1.5)  # fmt: skip


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, item in entries for path in paths(item, (*at, key)))]


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    if isinstance(value, dict):
        return {key: changed(item, path[1:], new) if key == path[0] else item for key, item in value.items()}
    return [changed(item, path[1:], new) if number == path[0] else item for number, item in enumerate(value)]


def test_a_status_as_its_schema_says_is_untouched() -> None:
    assert readable(FULL) == fitted(FULL) == FULL


@pytest.mark.parametrize("path", [path for path in paths(FULL) if path], ids=lambda path: ".".join(map(str, path)))
def test_what_is_no_part_of_a_status_is_left_out_and_the_rest_stays(path: tuple[Any, ...]) -> None:
    for nonsense in NONSENSE:
        left = fitted(changed(FULL, path, nonsense))
        SCHEMA.validate(left)
        assert all(left[name] == value for name, value in FULL.items() if name != path[0])


def test_entries_of_one_list_that_are_wrong_in_different_ways_all_go() -> None:
    wrong = [7, {**CONDITION, "type": "Failed", "lastTransitionTime": "never"}, {**CONDITION, "type": "Held", "observedGeneration": -1}]
    assert readable({"conditions": [*wrong, CONDITION]}) == {"conditions": [CONDITION]}


def test_no_stored_status_stops_a_decision_or_a_scrape() -> None:
    """Nor that of any other job, which is looked at while this one waits for nodes."""
    seen = running()
    for path in paths(FULL)[1:]:
        for number, nonsense in enumerate(
            item for item in NONSENSE if not isinstance(item, dict)
        ):  # no API server stores one that lacks what is required
            inventory = Inventory()
            inventory.observe("TrainingJob", {**seen.job, "status": changed(FULL, path, nonsense)}, deleted=False)
            observed = inventory.observed(("ns", "x"))
            reconcile(replace(seen, job=observed.job, waiting=(observed.job,)), None, CONTEXT, NOW)
            if number % 4 == len(path) % 4:
                registry = CollectorRegistry()
                registry.register(Jobs(lambda: True, inventory.job_objects, lambda uid: NOW, lambda: 0))
                assert b"lockstep_jobs" in generate_latest(registry)


REPORT = Report(
    JobIdentity("x", "ns", UID), "x-0", 7, 2, 1, State.RUNNING, "all ranks run", (NodeReport(0, True, 1), NodeReport(1, True, 1)),
        RankCount(2, 2),
    TrainerReport("Step", 5, 10, 60), CheckpointReport(5, "/workspace/c", TIME),
        Failure("m", 1, 1, 1, "SIGKILL", "E", ("l",), Cause.HANG, 4, "a", "s"), 1,
    (Restart(1, TIME, Failure("m", 1, 1, cause=Cause.HANG), 3, 10),), StopReport(1, TIME, Save.SAVED, "saved", 5, 0),
        (Straggler(1, 1, "1.4", 9),), {"adapter": "/a"},
    Goodput(1, 2000, {"train": 1000}, {"Hang": Loss(1000, 8000)}), ("line",),
    fabric=FabricReport(Verified.UNKNOWN, next(iter(FabricReason)), "m", "TCP", differing=(DifferingRanks(1, "1", "w"),)),
    preflight=PreflightReport(TIME, True, ("a",), 2, 5, (Finding("c", Severity.WARNING, "m", "f", 1),), 0, Bandwidth(2, 1, 1)),
        order=(1, 0),
    failed_saves=FailedSaves(5, "rank 1 on node 1: disk full", TIME, 2),
)  # fmt: skip
ABSURD: dict[type, tuple[Any, ...]] = {
    int: (-1, -(2**63), 2**63, 2**64, 10**400, 0),
    str: ("", "x" * 9000, "0000-01-01T00:00:00Z", "2026-01-01T00:00:00+99:99", "\x1b[2J", "\ud800", "yesterday"),
    bool: (False, True),
    type(None): (),
}


def absurd(value: Any, random_: random.Random) -> Any:
    """The same report with some of its values replaced by others of their types, and some lists much longer."""
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{f.name: absurd(getattr(value, f.name), random_) for f in fields(value) if f.name not in ("job", "pod", "format")}
        )
    if isinstance(value, tuple) and value:
        return tuple(absurd(item, random_) for item in value) * random_.choice((1, 1, 1, 0, 60))
    if isinstance(value, dict):
        return {random_.choice((key, "made-up", "")): absurd(item, random_) for key, item in value.items()}
    choices = ABSURD.get(type(value), ())
    return random_.choice(choices) if choices and random_.random() < 0.2 else value


@pytest.mark.parametrize("seed", range(60))
def test_whatever_a_pod_reports_the_status_is_one_that_the_api_server_takes(seed: int) -> None:
    """And what it says of itself stays: the job's end is not lost because of one value beside it."""
    random_ = random.Random(seed)  # noqa: S311 (no secret)
    seen = running()
    state = random_.choice((State.RUNNING, State.COMPLETE, State.FAILED))
    body = report_body(replace(absurd(REPORT, random_), state=state))
    received = ReceivedReport(parse_report(body), str(seen.pods[0]["metadata"]["uid"]), NOW)
    plan = reconcile(seen, received, CONTEXT, NOW)
    assert plan.status is not None
    SCHEMA.validate(plan.status)
    status = {c["type"]: c["status"] for c in plan.status["conditions"]}
    assert len(status) == 14
    assert (status["Complete"], status["Failed"]) == (
        ("True" if state is State.COMPLETE else "False"),
        ("True" if state is State.FAILED else "False"),
    )
    assert readable(plan.status) == fitted(plan.status) == plan.status
    metrics = Metrics()
    metrics.count(seen, {})
    metrics.count(seen, plan.status)
    labels = {sample.labels.get("cause") for family in metrics.registry.collect() for sample in family.samples}
    assert labels <= {None, *(cause.value for cause in Cause)}
