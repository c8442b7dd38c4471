"""What only another version of Lockstep knows is read, kept as its words, and ends nothing."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pkgutil
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest

import lockstep_gang.contract
from lockstep.plan.hosts.facts import JobOnHost
from lockstep.plan.reconcile.interactive import release_due
from lockstep.plan.reconcile.reconcile import reconcile
from lockstep.plan.reconcile.stopping import stop_event
from lockstep.platforms.local.records import _conditions
from lockstep_gang.agent.agent import Agent
from lockstep_gang.agent.preflight.answers import NodePreflight
from lockstep_gang.build import build_id
from lockstep_gang.contract.fabric import FabricReason, FabricReport, Verified
from lockstep_gang.contract.interactive import Idleness, InteractiveReport
from lockstep_gang.contract.lines import PassedOver
from lockstep_gang.contract.messages import Finish, Progressed, Reported, Stop, StopMode
from lockstep_gang.contract.preflight import Check, Checked, Expected, ExpectedPath, Kind, PathFact, Stage
from lockstep_gang.contract.report import ENDS, Cause, Failure, Report, Save, State, parse_report, report_body, smallest
from lockstep_gang.contract.run import Run, WhenDone
from lockstep_gang.lifecycle.history import AttemptRecord, EndRecord, resume_gang
from lockstep_spec import training
from lockstep_spec.choices import Batches, Choice
from lockstep_spec.codec import WORD_CHARACTERS, ContractError, camel, from_json, settings_from_json, to_json
from lockstep_train.checkpoint.format.manifest import Manifest
from unit.gang.cases import make_run
from unit.gang.preflight.test_checks import EXPECTED, MODEL, found
from unit.gang.story import Story, started
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, condition, report, running

WORD = "Newer"
CONTRACT = [
    importlib.import_module(f"lockstep_gang.contract.{module.name}") for module in pkgutil.iter_modules(lockstep_gang.contract.__path__)
]
MODULES = [*CONTRACT, *map(importlib.import_module, (
    "lockstep_gang.lifecycle.history", "lockstep_gang.coordinator.records", "lockstep_train.checkpoint.format.manifest",
))]  # fmt: skip
"""Modules whose dataclasses are read by another version than the one that wrote them."""


def parts(hint: Any) -> tuple[Any, Any]:
    """A hint without its bounds and without null, and its origin."""
    if get_origin(hint) is Annotated:
        return parts(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return parts(next(each for each in get_args(hint) if each is not type(None)))
    return hint, get_origin(hint)


def sample(hint: Any) -> Any:
    """JSON that is read as this."""
    kind, origin = parts(hint)
    if origin is tuple:
        return [sample(get_args(kind)[0])] if parts(get_args(kind)[0])[0] is str else []
    if origin is not None or kind in (dict, Any):
        return {}
    if dataclasses.is_dataclass(kind):
        return filled(kind)
    return next(iter(kind)).value if issubclass(kind, Choice) else {str: "x", int: 1, float: 1.0, bool: True}[kind]


def filled(kind: Any) -> dict[str, Any]:
    """JSON of a dataclass with the fields that it requires."""
    hints = get_type_hints(kind, include_extras=True)
    values = {field.name: sample(hints[field.name]) for field in dataclasses.fields(kind) if is_required(field)}
    values |= {"adapter": {"names": {}}} if kind is Manifest else {}
    return {camel(name): value for name, value in values.items()}


def is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def choices(*modules: types.ModuleType) -> Iterator[tuple[Any, str]]:
    """Each dataclass of these modules with each of its fields that is a Choice, alone or in a collection."""
    for module in modules:
        for _, kind in inspect.getmembers(module, lambda item: inspect.isclass(item) and dataclasses.is_dataclass(item)):
            for name, hint in get_type_hints(kind, include_extras=True).items() if kind.__module__ == module.__name__ else ():
                inner, origin = parts(hint)
                if inspect.isclass(inner if origin is None else parts(get_args(inner)[-1])[0]) and issubclass(inner, Choice):
                    yield kind, name


WIRE, SETTINGS = list(choices(*MODULES)), list(choices(training))


def test_the_walk_finds_what_another_version_reads() -> None:
    assert {(Report, "state"), (Failure, "cause"), (Run, "when_done"), (Stop, "mode"), (EndRecord, "state"), (Manifest, "batches")} <= set(
        WIRE
    )
    assert len(WIRE) >= 18 and len(SETTINGS) >= 10


@pytest.mark.parametrize(("kind", "name"), WIRE, ids=lambda item: getattr(item, "__name__", item))
def test_an_unknown_word_is_kept_and_written_again_wherever_another_version_reads(kind: Any, name: str) -> None:
    value = filled(kind) | {camel(name): WORD}
    read = from_json(kind, value, "it")
    word = getattr(read, name)
    assert (str(word), word.is_known, type(word).read(str(word)) == word) == (WORD, False, True)
    assert not any(word is member or word == member for member in type(word))
    assert to_json(read)[camel(name)] == WORD
    assert from_json(kind, to_json(read), "it") == read
    for no_word in ("", "x" * (WORD_CHARACTERS + 1), 1, None if name in ("state", "mode") else 1.5):
        with pytest.raises(ContractError, match=f"^it.{camel(name)} is .*, but must be one of"):
            from_json(kind, value | {camel(name): no_word}, "it")


@pytest.mark.parametrize(("kind", "name"), SETTINGS, ids=lambda item: getattr(item, "__name__", item))
def test_an_unknown_word_that_a_person_typed_is_an_error(kind: Any, name: str) -> None:
    alone = dataclasses.make_dataclass("Alone", [(name, get_type_hints(kind)[name])])
    assert not getattr(from_json(alone, {camel(name): WORD}, "it"), name).is_known
    with pytest.raises(ContractError, match=f'^it.{camel(name)} is "{WORD}", but must be one of'):
        settings_from_json(alone, {camel(name): WORD}, "it")


def test_words_that_are_known_are_the_members() -> None:
    assert all(State.read(state.value) is state and state.is_known for state in State)
    assert State.read(WORD) not in ENDS and {State.COMPLETE, State.FAILED} == ENDS


def is_over(state: State) -> bool:
    """The operator ends the job, or lets go of its pods."""
    plan = reconcile(running(), report(state), CONTEXT, NOW)
    ends = any(condition(plan, name)[0] == "True" for name in ("Complete", "Failed"))
    return ends or bool(plan.delete) or any((item.get("spec") or {}).get("replicas") == 0 for item in plan.apply)


def is_over_on_hosts(state: State) -> bool:
    return JobOnHost(ended={"jobUid": "u", "state": state.value}).records_end("u", 0)


def is_over_here(state: State) -> bool:
    return any(one["type"] in ("Complete", "Failed", WORD) for one in _conditions({"attempt": 1}, {"state": state.value}, "", runs=True))


def is_over_on_its_node(state: State) -> bool:
    """The agent kills its ranks."""
    done: list[str] = []
    stub: Any = SimpleNamespace(_node=SimpleNamespace(index=0), _finish=None, _standby=SimpleNamespace(drop=lambda: None))
    stub._passed_over, stub._may_end, stub._kill = PassedOver(lambda _: None), lambda: None, lambda: done.append("kill")
    Agent._end(stub, Finish(state, ""))
    return bool(done) or stub._finish is not None


def counts_after_its_pod(state: State) -> bool:
    """The operator goes by a report whose pod is gone."""
    plan = reconcile(running(), replace(report(state), pod_uid="gone"), CONTEXT, NOW)
    return condition(plan, "RanksReady")[1] != "WaitingForReport"


@pytest.mark.parametrize("ends", [is_over, is_over_on_hosts, is_over_here, is_over_on_its_node, counts_after_its_pod])
def test_no_unknown_state_is_an_end(ends: Callable[[State], bool]) -> None:
    assert (ends(State.FAILED), ends(State.read(WORD))) == (True, False)


@pytest.mark.parametrize(("retry", "states"), [(0, (WORD, "Failed")), (1, ("Waiting", "Waiting"))])
def test_a_gang_whose_recorded_end_is_unknown_waits_for_a_retry(retry: int, states: tuple[str, str]) -> None:
    run = make_run(restart=replace(make_run().restart, retry=retry))
    for word, state in zip((WORD, "Failed"), states, strict=True):
        end = EndRecord("uid-1", State.read(word), "m", 1, 0, "2026-01-01T00:00:00Z")
        story = Story(run, resume_gang(run, [], end, 1000.0)).decide()
        assert (str(story.report.state), story.records, story.orders) == (state, [], [])


def test_an_attempt_that_ended_in_an_unknown_way_is_no_failure() -> None:
    run = make_run()
    outcomes = {word: AttemptRecord(1, "uid-1", 0, "2026-01-01T00:00:00Z", outcome=word) for word in (None, "Stopped", WORD)}
    failures = {word: resume_gang(run, [record], None, 1000.0).failure is not None for word, record in outcomes.items()}
    assert failures == {None: True, "Stopped": False, WORD: False}


@pytest.mark.parametrize(
    ("mode", "does"), [(StopMode.KILL, "kill"), (StopMode.DUMP, "dump"), (StopMode.SAVE, "save"), (StopMode.read(WORD), "save")]
)
def test_an_unknown_way_to_stop_saves(mode: StopMode, does: str) -> None:
    done: list[str] = []
    stub: Any = SimpleNamespace(_running=True, _node=SimpleNamespace(index=0))
    stub._kill, stub._dump, stub._save = (partial(done.append, word) for word in ("kill", "dump", "save"))
    Agent._stop(stub, Stop(1, mode, ""))
    assert done == [does]


@pytest.mark.parametrize(("when_done", "ends"), [(WhenDone.EXIT, True), (WhenDone.read(WORD), False)])
def test_an_agent_stays_after_the_end_unless_it_is_told_to_exit(when_done: WhenDone, ends: bool) -> None:
    done: list[bool] = []
    stub: Any = SimpleNamespace(_finish=Finish(State.COMPLETE, ""), _run=make_run(when_done=when_done), _running=False)
    stub._leaving = stub._gave_up = False
    stub._done = SimpleNamespace(set=lambda: done.append(True))
    Agent._may_end(stub)
    assert bool(done) is ends


def test_an_agent_says_its_build() -> None:
    stub: Any = SimpleNamespace(_ranks=None, _known_attempt=1, _running=False, _leaving=False, _instance="a", _unable="")
    stub._fabric, stub._node = SimpleNamespace(forget_sent=lambda _: None), SimpleNamespace(index=1)
    assert (Agent._hello(stub).build, Agent._hello(stub).known_attempt) == (build_id(), 1)


async def _of_stage(stage: Stage) -> Checked:
    stub: Any = SimpleNamespace()
    return await NodePreflight._answered(stub, Check(3, stage, "t"))


def test_an_unknown_question_is_answered_at_once_with_nothing() -> None:
    answering = _of_stage(Stage.read(WORD))
    with pytest.raises(StopIteration) as ended:
        answering.send(None)
    assert ended.value.value == Checked(3)


@pytest.mark.parametrize(("kind", "count"), [(Kind.FOLDER, 1), (Kind.read(WORD), 0)])
def test_a_path_of_an_unknown_kind_stops_no_start(kind: Kind, count: int) -> None:
    expected: Expected = replace(EXPECTED, paths=(ExpectedPath(MODEL.field, MODEL.path, kind),))
    findings = found({"paths": (PathFact("/m", "File"),)}, preflight=expected)
    assert [finding.check for finding in findings if finding.node == 2] == ["paths"] * count


def test_an_unknown_save_verdict_or_idleness_is_said_in_its_words() -> None:
    stop = {"save": WORD, "message": "m"}
    assert stop_event({}, {"stop": stop}) == ("Warning", "StopNotConfirmed", "m")
    for word, reason in ((WORD, WORD), ("no reason", "Unknown")):
        fabric = FabricReport(Verified.read(word), FabricReason.read(word), "m")
        assert condition(reconcile(running(), report(fabric=fabric), CONTEXT, NOW), "FabricVerified") == ("Unknown", reason, "m")
    due = [
        release_due(running(), report(interactive=InteractiveReport(True, idleness=each))) for each in (Idleness.OVER, Idleness.read(WORD))
    ]
    assert due == [True, False]
    assert not Save.read(WORD).is_known and not Batches.read(WORD).is_known


def test_reports_of_ranks_of_an_unknown_kind_change_nothing() -> None:
    step, newer = {"event": "step", "rank": 0, "step": 3}, {"event": "fuse", "rank": 0}
    for message in (Progressed(1, (newer, step)), Reported(1, newer), Reported(1, step)):
        trainer = started().hears(0, message).report.trainer
        assert (trainer.step if trainer is not None else None) == (None if message == Reported(1, newer) else 3)


def test_a_report_is_read_without_optional_parts_that_cannot_be() -> None:
    body = json.loads(report_body(report(State.FAILED, failure=Failure("m", 1), retry=2).report))
    errors: dict[str, str] = {}
    read = parse_report(
        json.dumps(body | {"failure": {"rank": "one"}, "history": [1], "goodput": {"spent": 1}}).encode(), errors.setdefault
    )
    assert (read.state, read.failure, read.history, read.retry) == (State.FAILED, None, (), 2)
    assert [error.split(" ")[0] for error in errors.values()] == ["report.failure.message", "report.history[0]", "report.goodput.spent"]
    for change in ({"job": 1}, {"state": 1}, {"attempt": "1"}, {"format": "lockstep-report/9"}):
        with pytest.raises(ContractError, match=rf"report\.{next(iter(change))}"):
            parse_report(json.dumps(body | change).encode())


def test_the_smallest_report_has_what_ends_a_job_and_no_word_that_could_be_unknown() -> None:
    whole = report(State.FAILED, failure=Failure("m" * 9999, 1, 0, cause=Cause.KILLED), retry=2, log=("x" * 9999,)).report
    least = smallest(whole)
    same = ("job", "pod", "sequence", "attempt", "restarts", "state", "retry", "ranks", "nodes")
    assert all(getattr(least, name) == getattr(whole, name) for name in same)
    assert (least.failure, least.log) == (Failure("m" * 200, 1, 0), ())
    assert len(report_body(least)) < 1500
