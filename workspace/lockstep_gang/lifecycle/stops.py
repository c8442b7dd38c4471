"""Result of a stop that was asked for, by what was reported and not by what was hoped (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lockstep_gang.contract.messages import StopMode
from lockstep_gang.contract.report import Save, StopReport
from lockstep_gang.contract.run import Run
from lockstep_gang.contract.times import stamp
from lockstep_gang.lifecycle.gang import Gang, Phase
from lockstep_gang.lifecycle.hang import dump_text
from lockstep_spec.exits import SAVED
from lockstep_spec.words import clauses, named

SAME_MOMENT_SECONDS = 1.0
"""Head start of an agent, which counts its ranks' grace from a moment before the coordinator hears of the stop."""


def stop_report(gang: Gang, run: Run, now: float) -> StopReport:
    """Report at the end of a save and stop: the work is saved when the newest commit is of the last step that was reported."""
    done = gang.trainer.step if gang.trainer is not None else None
    if run.training is None and gang.checkpoint is None:
        return _by_the_script_alone(gang, done, now)
    if done is None:
        return _before_the_first_step(gang, now)
    lost = max(0, done - (_committed(gang) or 0))
    if lost == 0:
        return _report(gang, now, Save.SAVED, f"saved at step {_committed(gang)} and stopped", 0)
    since = "the start" if _committed(gang) is None else f"the commit of step {_committed(gang)}"
    steps = "1 step" if lost == 1 else f"{lost} steps"
    text = f"stopped without a save: {steps} since {since} {'is' if lost == 1 else 'are'} lost: {_why_not_saved(gang, run, now)}"
    return _report(gang, now, Save.NOT_SAVED, text, lost)


def with_idle_stop(gang: Gang, now: float) -> Gang:
    """The gang after a stop that was asked for while no rank ran: it is reported too, and costs nothing more."""
    is_reported = gang.stopped is not None and gang.stopped.attempt == gang.attempt
    if gang.phase is not Phase.WAITING or gang.attempt == 0 or is_reported or not gang.nodes[0].leaving:
        return gang
    where = f"the newest commit is step {_committed(gang)}" if _committed(gang) is not None else "nothing was committed yet"
    return replace(gang, stopped=_report(gang, now, Save.NOTHING_TO_SAVE, f"stopped while no rank ran: {where}", 0))


def _before_the_first_step(gang: Gang, now: float) -> StopReport:
    where = f"; the newest commit is step {_committed(gang)}" if _committed(gang) is not None else ""
    return _report(gang, now, Save.NOTHING_TO_SAVE, f"stopped before the first step of attempt {gang.attempt}{where}", 0)


def _by_the_script_alone(gang: Gang, done: int | None, now: float) -> StopReport:
    """Report for a script that never reported a commit: it may save on its own, or not at all."""
    codes = sorted({rank.exit.how for rank in gang.ranks if rank.exit is not None})
    ended = f"its ranks {' or '.join(codes).replace('was ended', 'were ended')}" if codes else "how its ranks ended is not known"
    at = "" if done is None else f" at step {done}"
    text = f"stopped{at}: {ended}; the script reports no checkpoint, so only it knows what was saved"
    return _report(gang, now, Save.UNKNOWN, text, None)


def _why_not_saved(gang: Gang, run: Run, now: float) -> str:
    """The first reason that applies, the most telling one first."""
    exits = {index: rank.exit for index, rank in enumerate(gang.ranks) if rank.exit is not None}
    stuck = [index for index in busy_nodes(gang) if gang.nodes[index].stuck]
    if stuck:
        return stuck_nodes_text(gang, run, stuck)
    killed = [index for index, exit_ in exits.items() if exit_.signal == "SIGKILL"]
    if killed and now - gang.stop_began >= run.save_grace_seconds - SAME_MOMENT_SECONDS:
        return f"{named('rank', killed)} still ran after the {run.save_grace_seconds} s that a save may take, and were killed"
    broken = [index for index, exit_ in exits.items() if exit_.signal is not None or exit_.exit_code not in (0, SAVED)]
    if broken:
        error = gang.ranks[broken[0]].error
        words = f": {error.exception}: {error.message}"[:300] if error is not None else ""
        return f"rank {broken[0]} {exits[broken[0]].how}{words}"
    silent = [
        index
        for index, node in enumerate(gang.nodes)
        if not node.connected and any(gang.ranks[r].exit is None for r in run.ranks_of(index))
    ]
    if silent:
        return f"node {silent[0]} was gone before it said how its ranks ended"
    return "no rank says why"


def _committed(gang: Gang) -> int | None:
    return gang.checkpoint.step if gang.checkpoint is not None else None


def _report(gang: Gang, now: float, save: Save, message: str, lost: int | None) -> StopReport:
    return StopReport(gang.attempt, stamp(now), save, message, _committed(gang), lost)


END_SECONDS = 60.0
"""Time that nodes have to end their ranks by SIGKILL; a process that frees much memory needs seconds."""


def busy_nodes(gang: Gang) -> list[int]:
    """Nodes that are here, with ranks of an attempt."""
    return [index for index, node in enumerate(gang.nodes) if node.connected and node.attempt]


def stop_deadline(gang: Gang, run: Run) -> float | None:
    """Time until which a stop waits for its nodes; None: nothing is being stopped."""
    if gang.phase is not Phase.STOPPING:
        return None
    return gang.stop_began + END_SECONDS + (run.save_grace_seconds if gang.stopping is StopMode.SAVE else 0)


def is_over(gang: Gang, run: Run, now: float) -> bool:
    """Return True if the attempt that is being stopped is concluded: nothing of it is left on any node that can be reached, or its time is
    over.
    """
    deadline = stop_deadline(gang, run)
    return deadline is not None and (not gang.nodes.counts.busy or now >= deadline)


def with_stop_concluded(gang: Gang) -> Gang:
    """The gang whose attempt is concluded: nodes that still have ranks are marked."""
    return gang.with_nodes({index: replace(gang.nodes[index], stuck=True) for index in busy_nodes(gang)})


def with_stuck_nodes(text: str, gang: Gang, run: Run) -> str:
    """The text, followed by the nodes that could not end their ranks."""
    note = stuck_nodes_text(gang, run, [index for index in busy_nodes(gang) if gang.nodes[index].stuck])
    return text if not note or note in text else f"{text[: max(0, 998 - len(note))]}; {note}"


def stuck_nodes_text(gang: Gang, run: Run, nodes: list[int]) -> str:
    """`node 1 could not end rank 3; its process can't be interrupted (state D): …; check that node`; empty without nodes."""
    return clauses([_on_node(gang, run, node) for node in nodes])[:600]


def _on_node(gang: Gang, run: Run, node: int) -> str:
    ranks = list(_left(gang, run, node))
    if not ranks:
        dump = next((dump for dump in gang.dumps if dump.rank in run.ranks_of(node) and dump.state == "D"), None)
        return f"node {node} could not end all processes of attempt {gang.nodes[node].attempt}{dump_text(dump)}; check that node"
    dump = next((dump for dump in gang.dumps if dump.rank in ranks and dump.state), None)
    return f"node {node} could not end {named('rank', ranks)}{dump_text(dump)}; check that node"


def _left(gang: Gang, run: Run, node: int) -> Iterator[int]:
    if gang.nodes[node].attempt == gang.attempt:
        yield from (rank for rank in run.ranks_of(node) if gang.ranks[rank].exit is None)
