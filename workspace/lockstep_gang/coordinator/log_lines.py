"""Lines about the gang in node 0's log: one for each change that a person wants to know of."""

from __future__ import annotations

import json
from collections.abc import Iterator

from lockstep_gang.contract.fabric import FabricReason, Verified
from lockstep_gang.contract.messages import RankExit, StopMode
from lockstep_gang.contract.preflight import PREFLIGHT_RESULT, Bandwidth, PreflightReport
from lockstep_gang.contract.report import State
from lockstep_gang.contract.run import Run
from lockstep_gang.lifecycle.gang import Gang, Phase, Request
from lockstep_gang.lifecycle.placement import racks_line
from lockstep_gang.lifecycle.preflight.rounds import ends_with_it
from lockstep_gang.lifecycle.session import idleness_line, older_scripts
from lockstep_gang.lifecycle.silences import open_silence_of, silence_lines
from lockstep_gang.lifecycle.start import start_banner
from lockstep_gang.lifecycle.stragglers import straggler_text
from lockstep_gang.lifecycle.summary import message_of, state_of
from lockstep_spec.choices import Severity
from lockstep_spec.codec import to_json
from lockstep_spec.words import number_of

WITH_LINES = 128
"""Number of ended ranks that are shown with their last lines: when thousands lose their peers, the first ones tell why."""


def log_lines(before: Gang, after: Gang, run: Run) -> Iterator[str]:
    """Lines about the differences of `after` from `before`. Looks only at what has changed: it is called after every message of every
    node.
    """
    yield from silence_lines(before, after, run)
    yield from _nodes(before, after, run)
    yield from _exits(before, after, run)
    yield from _explained(before, after)
    yield from _preflight(before, after, run)
    yield from _fabric(before, after)
    yield from _stragglers(before, after)
    yield from session_lines(before, after, run)
    yield from _phases(before, after, run)


def _nodes(before: Gang, after: Gang, run: Run) -> Iterator[str]:
    if before.nodes is after.nodes or after.phase is Phase.ENDED:
        return  # kubelets start containers again after the end, and the log has been written
    for index, (old, new) in enumerate(zip(before.nodes, after.nodes)):  # noqa: B905 (both have run.nodes)
        if old is new:
            continue
        if new.connected and not old.connected:
            yield f"node {index} is here ({after.nodes.counts.here} of {run.nodes})"
        elif old.connected and not new.connected:
            yield f"node {index} is gone: " + (
                "its connection closed" if open_silence_of(after, index) is None else "nothing is heard of it any more"
            )


def _preflight(before: Gang, after: Gang, run: Run) -> Iterator[str]:
    result = after.preflight.result
    if result is None or result is before.preflight.result:
        return
    yield from preflight_lines(result)
    if ends_with_it(run):
        yield f"{PREFLIGHT_RESULT}{json.dumps(to_json(result))}"


def _explained(before: Gang, after: Gang) -> Iterator[str]:
    if before.history is after.history:
        return
    explained = {entry.attempt for entry in before.history if entry.explained_by is not None}
    for entry in after.history:
        if entry.explained_by is not None and entry.attempt not in explained:
            yield f"{entry.failure.message}: attempt {entry.attempt} does not count toward restart.maxRestarts"


def _fabric(before: Gang, after: Gang) -> Iterator[str]:
    verdict = after.fabric.verdict
    if verdict is not None and verdict != before.fabric.verdict and verdict.reason is not FabricReason.WAITING:
        yield f"{'warning, ' if verdict.verified is Verified.FALSE else ''}fabric: {verdict.message}"


def _stragglers(before: Gang, after: Gang) -> Iterator[str]:
    if before.stragglers == after.stragglers or before.attempt != after.attempt:
        return
    for straggler in after.stragglers:
        if straggler not in before.stragglers:
            yield straggler_text(straggler)
    now = {straggler.rank for straggler in after.stragglers}
    for straggler in before.stragglers:
        if straggler.rank not in now:
            yield f"rank {straggler.rank} on node {straggler.node} is as fast as the others again"


def _exits(before: Gang, after: Gang, run: Run) -> Iterator[str]:
    if before.attempt != after.attempt:
        return
    for place in range(len(before.ranks.ended), len(after.ranks.ended)):
        exit_ = after.ranks[after.ranks.ended[place]].exit
        if exit_ is not None and not exit_.ordered and exit_.exit_code != 0:
            yield from _exit(exit_, run, with_lines=place < WITH_LINES)


def _exit(exit_: RankExit, run: Run, *, with_lines: bool) -> Iterator[str]:
    """Lines about the end of a rank, with its last lines if this log doesn't have its output, unless very many have ended before."""
    node = run.node_of(exit_.rank)
    lines = exit_.last_lines if with_lines and node != 0 and run.interactive is None else ()
    yield f"rank {exit_.rank} on node {node} {exit_.how}" + (", its last lines:" if lines else "")
    for line in lines:
        yield f"rank {exit_.rank} | {line}"


def _phases(before: Gang, after: Gang, run: Run) -> Iterator[str]:
    if after.attempt > before.attempt and run.interactive is not None:
        yield start_line(after, run)
    elif after.attempt > before.attempt:
        counted, most = after.budget.counted, run.restart.max_restarts
        budget = f" of at most {most}" if counted == after.restarts else f" ({counted} of at most {most} counted)"
        again = f", restart {after.restarts}{budget}" if after.restarts else ""
        yield f"attempt {after.attempt} starts: {number_of(run.world_size, 'rank')} on {number_of(run.nodes, 'node')}{again}"
        yield from start_banner(after, run)
        line = racks_line(after.placement)
        if line is not None:
            yield line
    if after.stopped is not None and after.stopped != before.stopped:
        yield after.stopped.message
    if after.phase is before.phase:
        if state_of(before) is State.STARTING and state_of(after) is State.RUNNING:
            yield f"all {run.world_size} ranks run" if run.world_size > 1 else "its rank runs"
        return
    if after.phase is Phase.STOPPING:
        how = "saving and stopping" if after.stopping is StopMode.SAVE else "stopping all ranks"
        how = "writing the stacks of every rank, then stopping all" if after.stopping is StopMode.DUMP else how
        yield f"{how}: {after.stop_reason}"
    elif after.phase is Phase.ENDED and after.ending is not None:
        yield f"{after.ending.state.value}: {after.ending.message}"
    elif after.phase is Phase.WAITING:
        yield message_of(after, run)


def preflight_lines(result: PreflightReport) -> Iterator[str]:
    errors = sum(finding.severity is Severity.ERROR for finding in result.findings)
    for finding in result.findings:
        yield f"preflight {finding.severity.value.lower()}: {finding.message}: {finding.fix}"
    if result.omitted:
        yield f"preflight: {number_of(result.omitted, 'more finding')} left out"
    checks = f"{number_of(len(result.checks), 'check')} on {number_of(result.nodes, 'node')}"
    ended = f"found {number_of(errors, 'error')}" if errors else "passed"
    tested = "" if result.self_test is None else f"; {result.self_test.words}"
    yield f"preflight: {checks} {ended} in {result.milliseconds / 1000:.1f} s{tested}{_measured(result.all_reduce)}"


def _measured(bandwidth: Bandwidth | None) -> str:
    if bandwidth is None:
        return ""
    size = f"{bandwidth.bytes // 1024**2} MiB"
    return f", all-reduce of {size} over {bandwidth.ranks} ranks: {bandwidth.bytes_per_second / 1e9:.3g} GB/s busbw"


def session_lines(before: Gang, after: Gang, run: Run) -> Iterator[str]:
    """Lines about a dev environment's runs; none for a Batch job."""
    old, new = before.session, after.session
    if new.request is not None:
        yield from _request_lines(old.request, new.request, run)
    if new.last is not None and new.last != old.last:
        yield f"{new.last.message} (exit code {new.last.exit_code})"
    if new.idleness is not old.idleness:
        yield idleness_line(new, run)


def _request_lines(old: Request | None, new: Request, run: Run) -> Iterator[str]:
    same = old is not None and old.asked.id == new.asked.id
    if not same:
        yield f"{new.asked.by} asks for: {new.asked.text}"
    if len(new.scripts) == run.nodes and (old is None or not same or len(old.scripts) < run.nodes):
        others = older_scripts(new)
        if others:
            yield (
                f"warning, {new.asked.command[0]} on node {others[0]} is not the same as on node 0: `lockstep sync` sends yours to every"
                " node"
            )


def start_line(gang: Gang, run: Run) -> str:
    """First line of a dev environment's attempt, instead of a Batch job's banner: an environment starts many."""
    request = gang.session.request
    what = request.asked.text if request is not None else "nothing"
    return f"attempt {gang.attempt} starts: {what}: {number_of(run.world_size, 'rank')} on {number_of(run.nodes, 'node')}"
