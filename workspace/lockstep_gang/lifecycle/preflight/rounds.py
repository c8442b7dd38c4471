"""The rounds of a preflight (pure): what is asked next, and what follows from the answers.

    look at yourself → meet the others → test every device → one all-reduce → pairs, while they say which node is slow

Every round has a deadline. A preflight that fails spends no attempt: it is made again after a while where waiting can help, for two
minutes, and else the job has failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lockstep_gang.contract.preflight import (
    Bandwidth,
    Check,
    Checked,
    Finding,
    Group,
    Looked,
    Measured,
    Met,
    Peer,
    PreflightReport,
    ProgramFact,
    SelfTestResult,
    Stage,
)
from lockstep_gang.contract.report import Cause, Failure
from lockstep_gang.contract.run import Run
from lockstep_gang.contract.times import stamp
from lockstep_gang.contract.trouble import LOST_PEER
from lockstep_gang.lifecycle.preflight.all_reduce import Measurement, busbw, judge_pairs, next_pairs
from lockstep_gang.lifecycle.preflight.checks import cause_of, checks_of, judge_all, judge_programs, programs_of, silent, without_trainer
from lockstep_gang.lifecycle.preflight.nodes import expected_of, without_torch
from lockstep_gang.lifecycle.preflight.self_test import SELF_TEST, TORCH_BUILD, judge_self_test, speed_of
from lockstep_spec.choices import Severity
from lockstep_spec.words import number_of


@dataclass(frozen=True)
class Preflight:
    """State of a preflight: the question, the nodes' answers, and the result of the last one."""

    stage: Stage | None = None
    """Question that all nodes have; null: none."""
    round: int = 0
    token: int = 0
    """Name of this preflight: the number of its first round."""
    began_at: float = 0.0
    asked_at: float = 0.0
    answers: tuple[tuple[int, Checked, float], ...] = ()
    """(node, its answer, when it came) of this round."""
    looked: tuple[tuple[int, Looked, float, float], ...] = ()
    """(node, what it found, when it was asked, when it answered)."""
    met: tuple[tuple[int, Met], ...] = ()
    tested: tuple[tuple[int, SelfTestResult], ...] = ()
    anew: bool = False
    """A self-test of an earlier start doesn't count."""
    groups: tuple[tuple[int, ...], ...] = ()
    ports: tuple[tuple[int, int], ...] = ()
    """(node, a port that is free there)."""
    whole: Measurement | None = None
    bandwidth: Bandwidth | None = None
    pairs: tuple[Measurement, ...] = ()
    pair_rounds: int = 0
    passed: bool = False
    """True if the next attempt may start."""
    result: PreflightReport | None = None
    """Result of the last one that ended."""
    failures: int = 0
    """Number since the last one that passed."""
    first_failed_at: float = 0.0
    retry_at: float = 0.0
    over: bool = False
    """True if it failed and making it again can't help any more."""
    programs: Mapping[str, ProgramFact] = field(default_factory=dict)
    """The program of each node, by its index, when the last one passed: what the attempt runs that it was for."""


ROUND_SECONDS = 15.0
"""Limit of one round's answers; an agent gives up a check of its own after 8 s."""
GROUP_SECONDS = 60
"""Limit of a self-test and of an all-reduce, the import of torch from a cold volume included. The coordinator waits 10 s longer."""
RETRY_SECONDS = (2.0, 30.0)
"""First and longest wait after a preflight that failed, doubled in between."""
PATIENCE_SECONDS = 120.0
"""Time for which it is made again."""
BEFORE_SECONDS = 5.0
"""Time before the end of a backoff at which it begins, so that it adds nothing to the wait and still tells how nodes are now. A restart
that doesn't wait begins with it."""
FINDINGS_MAX = 20
_FULL_MESH = 16
_DEVICE_CAUSES = ("Hardware", "NonFinite", "Hang")
_NETWORK_CAUSES = ("Fabric", "NodeLost", "Preempted", "Hang")


def neighbors(node: int, nodes: int) -> tuple[int, ...]:
    """The nodes that this one connects to: all of a few; of many those at distances 1, 2, 4, …, so that the work grows slowly."""
    others = (other for other in range(nodes) if other != node)
    if nodes <= _FULL_MESH:
        return tuple(others)
    return tuple(sorted({(node + 2**power) % nodes for power in range(nodes.bit_length())} - {node}))


def advance(preflight: Preflight, run: Run, cause: Cause | None, now: float) -> Preflight:
    """The next state while all nodes are here. `cause`: of the failure before this start, if there was one."""
    if run.preflight is None:
        return replace(preflight, passed=True)
    if preflight.passed or preflight.over or (preflight.stage is None and now < preflight.retry_at):
        return preflight
    if preflight.stage is None:
        return _begun(preflight, now)
    if len(preflight.answers) < len(_questioned(preflight, run)) and now < _deadline(preflight):
        return preflight
    return _after_round(preflight, run, cause, now)


def _after_round(preflight: Preflight, run: Run, cause: Cause | None, now: float) -> Preflight:
    if preflight.stage is Stage.LOOK:
        return _after_look(preflight, run, now)
    if preflight.stage is Stage.MEET:
        return _after_meet(preflight, run, cause, now)
    if preflight.stage is Stage.SELF_TEST:
        return _after_self_test(preflight, run, cause, now)
    return _after_all_reduce(preflight, run, now)


def with_answer(preflight: Preflight, node: int, checked: Checked, now: float) -> Preflight:
    """The state with a node's answer; one to an earlier question changes nothing."""
    is_answered = any(node == other for other, _, _ in preflight.answers)
    if preflight.stage is None or checked.round != preflight.round or is_answered:
        return preflight
    return replace(preflight, answers=(*preflight.answers, (node, checked, now)))


def interrupted(preflight: Preflight) -> Preflight:
    """The state after a node left, or when nothing is to start: what was asked is void."""
    return preflight if preflight.stage is None and not preflight.passed else replace(preflight, stage=None, passed=False, answers=())


def used(preflight: Preflight) -> Preflight:
    """The state once the attempt starts; the one after it has a preflight of its own."""
    return Preflight(round=preflight.round, result=preflight.result, programs=preflight.programs)


def preflight_order(preflight: Preflight, run: Run, node: int) -> Check | None:
    """Question for this node now."""
    if preflight.stage is None:
        return None
    token = str(preflight.token)
    if preflight.stage is Stage.LOOK:
        return Check(preflight.round, Stage.LOOK, token)
    ports = dict(preflight.ports)
    if preflight.stage is Stage.MEET:
        peers = tuple(Peer(other, ports[other]) for other in neighbors(node, run.nodes) if ports.get(other))
        return Check(preflight.round, Stage.MEET, token, peers)
    if preflight.stage is Stage.SELF_TEST:
        return Check(preflight.round, Stage.SELF_TEST, token, anew=preflight.anew)
    group = next((group for group in preflight.groups if node in group), None)
    if group is None:
        return None
    return Check(preflight.round, Stage.ALL_REDUCE, token, group=Group(group, ports.get(group[0], run.master_port), GROUP_SECONDS))


def ends_with_it(run: Run) -> bool:
    """Return True if only the preflight was asked for: no rank is started, and nothing is recorded."""
    return expected_of(run).only


def is_looking(preflight: Preflight) -> bool:
    """Return True in the first two rounds, which take a moment."""
    return preflight.stage in (Stage.LOOK, Stage.MEET)


def preflight_message(preflight: Preflight) -> str:
    """One sentence while it runs or waits to be made again; '' when there is nothing to say."""
    if preflight.stage is Stage.ALL_REDUCE:
        return "preflight: all-reduce" + (f" in pairs, round {preflight.pair_rounds}" if preflight.pair_rounds else "")
    if preflight.stage is Stage.SELF_TEST:
        return "preflight: testing every device"
    if is_looking(preflight):
        return "preflight: checking every node"  # the same for both rounds: each change of a job's message is a write
    failure = preflight_failure(preflight)
    return f"preflight failed and runs again soon: {failure.message}" if failure is not None and preflight.failures else ""


def preflight_wake_at(preflight: Preflight) -> float | None:
    """Time at which `advance` would do something though nobody said anything."""
    if preflight.stage is not None:
        return _deadline(preflight)
    return preflight.retry_at if preflight.failures and not preflight.over else None


def preflight_failure(preflight: Preflight) -> Failure | None:
    """The first error of the last preflight."""
    result = preflight.result
    errors = [finding for finding in result.findings if finding.severity is Severity.ERROR] if result is not None else []
    if not errors:
        return None
    first, more = errors[0], f" (and {number_of(len(errors) - 1, 'more finding')})" if len(errors) > 1 else ""
    return Failure(message=f"preflight: {first.message}: {first.fix}{more}"[:1000], node=first.node, cause=cause_of(first))


def doubts(preflight: Preflight) -> tuple[str, ...]:
    """List the warnings of the last preflight that may be why NCCL finds no RDMA device."""
    findings = preflight.result.findings if preflight.result is not None else ()
    return tuple(finding.message for finding in findings if finding.check in ("hcas", "gids", "lockedMemory"))


def _begun(preflight: Preflight, now: float) -> Preflight:
    anew = replace(used(preflight), failures=preflight.failures, first_failed_at=preflight.first_failed_at)
    begun = _ask(replace(anew, began_at=now), Stage.LOOK, now)
    return replace(begun, token=begun.round)


def _ask(preflight: Preflight, stage: Stage, now: float) -> Preflight:
    """Ask a question. Its number is larger than any that another coordinator gave: an agent must not take it for one that it has
    answered.
    """
    number = max(preflight.round + 1, int(now * 1000))
    return replace(preflight, stage=stage, round=number, asked_at=now, answers=())


def _questioned(preflight: Preflight, run: Run) -> list[int]:
    if preflight.stage is Stage.ALL_REDUCE:
        return sorted(node for group in preflight.groups for node in group)
    return list(range(run.nodes))


def _deadline(preflight: Preflight) -> float:
    return preflight.asked_at + (ROUND_SECONDS if is_looking(preflight) else GROUP_SECONDS + 10.0)


def _failed(preflight: Preflight) -> dict[int, str]:
    return {node: answer.failed for node, answer, _ in preflight.answers if answer.failed}


def _after_look(preflight: Preflight, run: Run, now: float) -> Preflight:
    looked = tuple((node, answer.looked, preflight.asked_at, at) for node, answer, at in preflight.answers if answer.looked is not None)
    preflight = replace(preflight, looked=looked, ports=tuple((node, facts.port) for node, facts, _, _ in looked))
    if len(looked) < run.nodes:
        return _ended(preflight, run, silent(run, [node for node, *_ in looked], ROUND_SECONDS, _failed(preflight)), now)
    return _ask(preflight, Stage.MEET, now)


def _after_meet(preflight: Preflight, run: Run, cause: Cause | None, now: float) -> Preflight:
    preflight = replace(preflight, met=tuple((node, answer.met) for node, answer, _ in preflight.answers if answer.met is not None))
    findings = [*silent(run, [node for node, _ in preflight.met], ROUND_SECONDS, _failed(preflight)), *_findings(preflight, run)]
    if _has_errors(findings):
        return _ended(preflight, run, findings, now)
    if expected_of(run).self_test is not None and not _untested(preflight, run):
        anew = cause is not None and cause.value in _DEVICE_CAUSES
        return _ask(replace(preflight, anew=anew), Stage.SELF_TEST, now)
    return _to_all_reduce(preflight, run, cause, now)


def _after_self_test(preflight: Preflight, run: Run, cause: Cause | None, now: float) -> Preflight:
    tested = tuple((node, answer.tested) for node, answer, _ in preflight.answers if answer.tested is not None)
    preflight = replace(preflight, tested=tested)
    findings = [*silent(run, [node for node, _ in tested], GROUP_SECONDS + 10.0, _failed(preflight)), *_findings(preflight, run)]
    return _ended(preflight, run, findings, now) if _has_errors(findings) else _to_all_reduce(preflight, run, cause, now)


def _findings(preflight: Preflight, run: Run) -> list[Finding]:
    """Everything that is wrong by the answers so far, but for the all-reduce."""
    untested = _untested(preflight, run) if expected_of(run).self_test is not None else []
    changed = judge_programs(run, preflight.programs, programs_of(preflight.looked))
    return [*judge_all(run, preflight.looked, dict(preflight.met)), *changed, *untested, *judge_self_test(run, dict(preflight.tested))]


def _untested(preflight: Preflight, run: Run) -> list[Finding]:
    return without_torch(run, preflight.looked, SELF_TEST, "the self-test")


def _has_errors(findings: list[Finding]) -> bool:
    return any(finding.severity is Severity.ERROR for finding in findings)


def _to_all_reduce(preflight: Preflight, run: Run, cause: Cause | None, now: float) -> Preflight:
    findings = _findings(preflight, run)
    is_measured = expected_of(run).all_reduce is not None and run.nodes > 1 and (cause is None or cause.value in _NETWORK_CAUSES)
    missing = without_torch(run, preflight.looked, "allReduce", "the all-reduce") if is_measured else []
    if missing or not is_measured:
        return _ended(preflight, run, [*findings, *missing], now)
    return _ask(replace(preflight, groups=(tuple(range(run.nodes)),)), Stage.ALL_REDUCE, now)


def _after_all_reduce(preflight: Preflight, run: Run, now: float) -> Preflight:
    asked = expected_of(run).all_reduce
    minimum = None if asked is None else asked.minimum_bytes_per_second
    measured = {node: answer.measured for node, answer, _ in preflight.answers if answer.measured is not None}
    measurements = tuple(_measurement(group, measured) for group in preflight.groups)
    preflight = replace(preflight, ports=tuple({**dict(preflight.ports), **{n: m.port for n, m in measured.items() if m.port}}.items()))
    if preflight.whole is None:
        preflight = replace(preflight, whole=measurements[0], bandwidth=_bandwidth(measured.get(0)))
    else:
        preflight = replace(preflight, pairs=(*preflight.pairs, *measurements))
    assert preflight.whole is not None  # noqa: S101 (set just now)
    if minimum is not None and preflight.whole.bytes_per_second < minimum:
        groups = next_pairs(run.nodes, preflight.pairs, minimum, preflight.pair_rounds) if run.nodes > 2 else ()
        if groups:
            return _ask(replace(preflight, groups=groups, pair_rounds=preflight.pair_rounds + 1), Stage.ALL_REDUCE, now)
    return _ended(preflight, run, [*_findings(preflight, run), *judge_pairs(run, preflight.whole, preflight.pairs, minimum)], now)


def _tests_made(preflight: Preflight, run: Run) -> tuple[str, ...]:
    if not preflight.tested:
        return ()
    return (SELF_TEST, TORCH_BUILD) if run.gpus_per_node else (SELF_TEST,)


def _measurement(group: tuple[int, ...], measured: dict[int, Measured]) -> Measurement:
    missing = next((node for node in group if node not in measured), None)
    if missing is not None:
        return Measurement(group, 0, f"node {missing} did not answer in {GROUP_SECONDS + 10} s")
    failed = [node for node in measured if node in group and measured[node].error]
    if failed:
        first = min(failed, key=lambda node: LOST_PEER.search(measured[node].error) is not None)  # who answered first, but for lost peers
        return Measurement(group, 0, f"on node {first}: {measured[first].error}")
    return Measurement(group, busbw(measured[group[0]]))


def _bandwidth(measured: Measured | None) -> Bandwidth | None:
    if measured is None or measured.error:
        return None
    return Bandwidth(measured.ranks, measured.bytes, busbw(measured))


def refused(preflight: Preflight, run: Run, node: int, why: str, now: float) -> Preflight:
    """The state after a node said that its ranks can't run at all, however many nodes are here yet."""
    return _ended(replace(preflight, began_at=now), run, [without_trainer(run, node, why)], now, ("trainer",))


def _ended(preflight: Preflight, run: Run, findings: list[Finding], now: float, checks: tuple[str, ...] = ()) -> Preflight:
    ordered = sorted(findings, key=lambda finding: (finding.severity is not Severity.ERROR, finding.node is None, finding.node or 0))
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    report = PreflightReport(
        time=stamp(now),
        ok=not errors,
        checks=checks
        or (
            *checks_of(run),
            *_tests_made(preflight, run),
            *(() if preflight.whole is None else ("allReduce",)),
        ),
        nodes=run.nodes,
        milliseconds=max(0, round((now - preflight.began_at) * 1000)),
        findings=tuple(ordered[:FINDINGS_MAX]),
        omitted=max(0, len(ordered) - FINDINGS_MAX),
        all_reduce=preflight.bandwidth,
        self_test=speed_of(run, dict(preflight.tested)),
    )
    ended = Preflight(result=report, round=preflight.round, passed=not errors, programs=preflight.programs)
    if not errors:
        return replace(ended, programs={**preflight.programs, **programs_of(preflight.looked)})
    first = preflight.first_failed_at if preflight.failures else now
    over = any(finding.final for finding in errors) or now - first >= PATIENCE_SECONDS or ends_with_it(run)
    wait = min(RETRY_SECONDS[0] * 2**preflight.failures, RETRY_SECONDS[1])
    return replace(ended, failures=preflight.failures + 1, first_failed_at=first, retry_at=now + wait, over=over)
