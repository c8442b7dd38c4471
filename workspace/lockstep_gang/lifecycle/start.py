"""The start of an attempt: what it waits for and how long, so that nodes that are here are not held for those that never come (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lockstep_gang.contract.messages import Finish
from lockstep_gang.contract.reply import FactType
from lockstep_gang.contract.report import Cause, Failure, State
from lockstep_gang.contract.run import Run
from lockstep_gang.contract.times import stamp
from lockstep_gang.lifecycle.gang import Gang, Phase
from lockstep_gang.lifecycle.hang import dump_text
from lockstep_gang.lifecycle.progress import Wait
from lockstep_gang.lifecycle.stops import busy_nodes, with_stuck_nodes
from lockstep_spec.words import LISTED, listed, named, number_of

_UNPLACED = frozenset({"Unschedulable", "Scheduling", "NotCreated"})
"""Reasons that the operator gives for a pod that no Node has room for yet. An image that can't be pulled, say, is another matter."""


def awaits_folder(gang: Gang, run: Run, owner: str, until: float) -> Gang:
    """The gang while it waits for another job to let go of the run's folder. `owner`: words for that job."""
    text = (
        f"waiting for the run's folder {run.run_dir}, which {owner} has: unless that shows a sign of life, this job takes it over at"
        f" {stamp(until)}"
    )
    return replace(gang, awaited=text, unwritten=None)


def without_folder(gang: Gang, problem: str) -> Gang:
    """The gang after another job was found to have the run's folder: it ends, and writes nothing there."""
    if gang.phase is Phase.ENDED:
        return gang
    text = f"{problem}. Two jobs can't train in one folder: give this one another name, or a volume of its own (spec.storage)"
    ended = replace(gang, phase=Phase.ENDED, awaited="", unwritten=None, untold=None, final=True)
    return replace(ended, failure=Failure(text, cause=Cause.CONFIGURATION), ending=Finish(State.FAILED, text))


def missing_nodes(gang: Gang) -> list[int]:
    """Nodes that an attempt can't start on: they are not here, or are busy with ranks of an earlier one."""
    return [index for index, node in enumerate(gang.nodes) if not node.connected or node.leaving or node.attempt]


def absent_nodes(gang: Gang) -> list[int]:
    return [index for index, node in enumerate(gang.nodes) if not node.connected or node.leaving]


def unplaced_nodes(gang: Gang, run: Run) -> list[int]:
    """Absent nodes that nobody says the cluster has room for: the operator says that it has none, or has said nothing since they were last
    here.

    Without an operator that is every absent node: `lockstep run` sees their pods, or their agents. Hosts have room: for them a limit is
    set.
    """
    if run.timeouts.return_seconds is not None:
        return []
    waiting = {fact.node for fact in gang.facts.latest if fact.type is FactType.WAITING and fact.reason in _UNPLACED}
    heard_at = gang.facts.heard_at
    return [index for index in absent_nodes(gang) if index in waiting or not heard_at or heard_at < (gang.nodes[index].closed_at or 0.0)]


def missing_ranks(gang: Gang) -> list[int]:
    return [index for index, rank in enumerate(gang.ranks) if not rank.ready and rank.exit is None]


def waits_for(gang: Gang, now: float) -> str:
    """`nodes` or `ranks` while somebody is waited for, else nothing. A job that backs off waits for nobody."""
    if gang.phase is Phase.WAITING and now >= gang.not_before and gang.nodes.counts.free < len(gang.nodes):
        return "nodes"
    return "ranks" if gang.phase is Phase.ACTIVE and gang.ranks.counts.missing else ""


def with_wait(gang: Gang, run: Run, now: float) -> Gang:
    """The gang with the beginning of what it waits for: of nodes, the moment from which every one of them has had room."""
    what = waits_for(gang, now)
    if what == "nodes" and unplaced_nodes(gang, run):
        return replace(gang, wait=Wait(what, gang.attempt, now, unplaced=True))
    gang = replace(gang, wait=replace(gang.wait, unplaced=False)) if gang.wait.unplaced else gang
    if what == gang.wait.what and (not what or gang.wait.attempt == gang.attempt):
        return gang
    return replace(gang, wait=Wait(what, gang.attempt, now) if what else Wait())


def start_deadline(gang: Gang, run: Run) -> float | None:
    if gang.wait.unplaced:
        return None  # the operator, or who has typed `lockstep run`, sees to it that what is held meanwhile isn't held for ever
    if run.interactive is not None and gang.wait.what == "nodes":
        return None  # whoever waits in a dev environment can give up, and if nobody does, its idle time ends
    return gang.wait.since + _allowed(gang, run)[0] if gang.wait.what else None


def is_late(gang: Gang, run: Run, now: float) -> bool:
    deadline = start_deadline(gang, run)
    return deadline is not None and now >= deadline


def late_nodes_failure(gang: Gang, run: Run) -> Failure:
    absent, busy = absent_nodes(gang), busy_nodes(gang)
    returns = _waits_for_returns(gang, run)
    what = [f"{listed_nodes(gang, run, absent)} did not come{' back' if returns else ''}"] if absent else []
    what += [f"{listed_nodes(gang, run, busy)} did not end their earlier ranks"] if busy else []
    after = f", after {gang.failure.message}" if gang.failure is not None else ""
    text = with_stuck_nodes(f"{' and '.join(what)} within the {_allowed_text(gang, run)}{after}", gang, run)
    return Failure(message=text[:1000], node=missing_nodes(gang)[0], cause=Cause.NODE_LOST if returns else Cause.SETUP)


def late_ranks_failure(gang: Gang, run: Run) -> Failure:
    """Failure about `gang.late` ranks, with what was seen of the first of them before it was killed."""
    rank = gang.late[0]
    dump = next((dump for dump in gang.dumps if dump.rank == rank), None)
    stacks = dump.stacks if dump is not None else None
    where = f"; stacks of all its threads are in {stacks}" if stacks else ""
    text = f"{listed_ranks(run, gang.late)} did not report within the {_allowed_text(gang, run)}{dump_text(dump)}{where}"
    return Failure(message=text[:1000], rank=rank, node=run.node_of(rank), cause=Cause.SETUP, activity="start", stacks=stacks)


def _allowed(gang: Gang, run: Run) -> tuple[int, str]:
    """Seconds that what is waited for may take, and the name of that limit."""
    if _waits_for_returns(gang, run):
        return run.timeouts.return_seconds or 0, "away_seconds"
    return run.timeouts.start_seconds, "startTimeoutSeconds"


def _allowed_text(gang: Gang, run: Run) -> str:
    seconds, name = _allowed(gang, run)
    return f"{seconds} s of {name}"


def _waits_for_returns(gang: Gang, run: Run) -> bool:
    """Return True if all nodes that are waited for were here before: an attempt begins with all of them."""
    if run.timeouts.return_seconds is None or gang.wait.what != "nodes":
        return False
    missing, absent = missing_nodes(gang), set(absent_nodes(gang))
    return bool(missing) and all(index in absent and bool(gang.attempt or gang.nodes[index].instance) for index in missing)


def listed_nodes(gang: Gang, run: Run, nodes: list[int]) -> str:
    """`node 1 of 2: x-1 (ImagePullBackOff)`, as far as that is known."""
    pods = ", ".join(filter(None, (gang.facts.waiting(node) or run.pod_name(node) for node in nodes[:LISTED])))
    return f"{named('node', nodes)} of {run.nodes}" + (f": {pods}" if pods else "")


def listed_ranks(run: Run, ranks: tuple[int, ...]) -> str:
    nodes = sorted({run.node_of(rank) for rank in ranks})
    return f"{named('rank', ranks)} on {named('node', nodes)}"


def start_banner(gang: Gang, run: Run) -> Iterator[str]:
    """Lines with which an attempt starts, after the one that says that it does."""
    yield f"  nodes: {listed([name for node in range(run.nodes) if (name := run.pod_name(node))]) or run.nodes}, {_ranks_words(run)}"
    yield f"  fabric: {_fabric(run)}"
    yield f"  run: {run.run_dir}, works in {run.working_directory}, log of what happens in {run.run_dir}/logs"
    yield f"  from: {_from(gang, run)}"


def _ranks_words(run: Run) -> str:
    if run.node_ranks:
        return f"{min(run.node_ranks)} to {max(run.node_ranks)} ranks each, " + ("one a GPU" if run.gpus_per_node else "on CPUs")
    ranks = number_of(run.ranks_per_node, "rank")
    return f"{ranks} and {number_of(run.gpus_per_node, 'GPU')} each" if run.gpus_per_node else f"{ranks} each, on CPUs"


def _from(gang: Gang, run: Run) -> str:
    commit = gang.checkpoint
    newest = f"the newest commit is step {commit.step}, {commit.path}" if commit is not None else ""
    if run.training is None:
        return f"{newest or 'no checkpoint was reported yet'}; the script finds its own, if it looks for any"
    resume = (run.training.get("checkpoint") or {}).get("resumeFrom", "Auto")
    places = {
        "None": "step 0, since resumeFrom is None",
        "Auto": f"the newest whole commit in {run.run_dir}/checkpoints, or step 0 where there is none",
    }
    return newest or places.get(resume, resume)


def _fabric(run: Run) -> str:
    if run.fabric is None:
        return "not stated, used as it is"
    hcas = f" on {', '.join(entry.removeprefix('=') for entry in run.fabric.hcas)}" if run.fabric.hcas else ""
    gloo = "; ranks without GPUs talk over gloo" if not run.gpus_per_node else ""
    return f"asked for {run.fabric.transport}{hcas}{gloo}"
