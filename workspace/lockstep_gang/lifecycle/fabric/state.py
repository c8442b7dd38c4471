"""The fabric of the newest attempt: what ranks have reported, the verdict, and whether it stops the job (pure).

A verdict against the fabric is reported when every rank has been heard, or after a while, so that its sentence names all ranks at once.
With degradedPolicy Fail it is final: the same pods have the same devices, drivers and variables, so a restart in place would end the same
way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lockstep_gang.contract.fabric import FabricReason, FabricReport, FaultKind, NcclFault, RankFabric, Verified
from lockstep_gang.contract.report import Cause, Failure
from lockstep_gang.contract.run import Run
from lockstep_gang.lifecycle.fabric.nccl import fault_words, worst_fault
from lockstep_gang.lifecycle.fabric.rank_fabric import has_spoken
from lockstep_gang.lifecycle.fabric.verdict import RankFabrics, verdict
from lockstep_spec.choices import DegradedPolicy
from lockstep_spec.words import clauses

SETTLE_SECONDS = 10.0
"""Time from the first sign that the fabric is not as asked until that is reported, while ranks are still silent."""
JUDGED_AT_ONCE = 64
"""Ranks of a gang in which every word is judged at once; a larger one is judged once in a millisecond for each further rank."""
STEPS_SECONDS = 15.0
"""Time after the first step by which every rank's log has been read."""
_UNTELLING = frozenset(
    {"RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "TimeoutError", "ChildFailedError"}
)
"""Exceptions that say no more than that a collective failed."""
_WEAK = frozenset({None, Cause.FABRIC, Cause.INTERNAL, Cause.USER_CODE, Cause.HANG})


@dataclass(frozen=True)
class FabricState:
    """State of the fabric. `ranks` holds one entry a rank, None until it is heard."""

    ranks: RankFabrics = ()
    judged: FabricReport | None = None
    """The verdict on what is known at this moment."""
    verdict: FabricReport | None = None
    """Verdict that is reported."""
    judge_at: float | None = None
    """Time at which what was heard since the last verdict is judged."""
    judged_at: float | None = None
    broken_since: float | None = None
    steps_since: float | None = None
    doubts: tuple[str, ...] = ()
    """Sentences of the preflight about NICs, which become the reason where ranks use sockets."""


def new_fabric(run: Run, now: float, doubts: tuple[str, ...] = ()) -> FabricState:
    """State at the start of an attempt. Nothing is said of gloo before an agent has named its interface."""
    state = FabricState(ranks=(None,) * run.world_size, doubts=doubts)
    return state if run.gpus_per_node == 0 else _judged(state, run, now)


def with_ranks_heard(state: FabricState, run: Run, ranks: tuple[RankFabric, ...], of_node: range, now: float) -> FabricState:
    """The state after a node has reported what its ranks' logs hold."""
    fabrics = list(state.ranks or (None,) * run.world_size)
    for rank in ranks:
        if rank.rank in of_node:
            fabrics[rank.rank] = rank
    return _judged(replace(state, ranks=tuple(fabrics)), run, now)


def after_step(state: FabricState, run: Run, now: float) -> FabricState:
    """The state after a step of the training: a rank that is still silent won't name its network any more."""
    if state.steps_since is None:
        return replace(state, steps_since=now)
    waits = state.verdict is not None and state.verdict.reason is FabricReason.WAITING
    return _judged(state, run, now) if waits and now >= state.steps_since + STEPS_SECONDS else state


def judged_by_now(state: FabricState, run: Run, now: float) -> FabricState:
    """The state after time has passed."""
    at = fabric_wake_at(state)
    return _judged(state, run, now) if at is not None and now >= at else state


def fabric_wake_at(state: FabricState) -> float | None:
    """Time at which there is something to judge, or a verdict is reported even if ranks stay silent."""
    untold = state.judged is not None and state.judged.verified is Verified.FALSE and state.verdict != state.judged
    settled_at = state.broken_since + SETTLE_SECONDS if untold and state.broken_since is not None else None
    return min((at for at in (settled_at, state.judge_at) if at is not None), default=None)


def _judged(state: FabricState, run: Run, now: float) -> FabricState:
    """Judge at once, or soon: hundreds of nodes of a large gang speak in the same second, and a verdict looks at every rank."""
    free_at = (state.judged_at or 0.0) + max(0, run.world_size - JUDGED_AT_ONCE) / 1000
    return replace(state, judge_at=free_at) if now < free_at else _with_verdict(replace(state, judge_at=None, judged_at=now), run, now)


def _with_verdict(state: FabricState, run: Run, now: float) -> FabricState:
    steps_done = state.steps_since is not None and now >= state.steps_since + STEPS_SECONDS
    judged = verdict(run, state.ranks, steps_done=steps_done)
    if judged is not None and judged.reason is FabricReason.FELL_BACK_TO_TCP and state.doubts:
        judged = replace(judged, message=f"{judged.message}; preflight warned: {clauses(state.doubts)}")
    if judged is None or judged.verified is not Verified.FALSE:
        return replace(state, judged=judged, verdict=judged, broken_since=None)
    since = now if state.broken_since is None else state.broken_since
    all_heard = all(has_spoken(rank) or (rank is not None and rank.unread) for rank in state.ranks)
    reported = judged if all_heard or now >= since + SETTLE_SECONDS else state.verdict
    return replace(state, judged=judged, verdict=reported, broken_since=since)


def refusal(state: FabricState, run: Run) -> Failure | None:
    """Failure for which the job may not go on over this fabric."""
    if run.fabric is None or run.fabric.degraded_policy is not DegradedPolicy.FAIL:
        return None
    if state.verdict is None or state.verdict.verified is not Verified.FALSE:
        return None
    node = state.verdict.differing[0].node if state.verdict.differing else None
    return Failure(message=state.verdict.message, node=node, cause=Cause.FABRIC)


def fault_kind(failure: Failure, state: FabricState) -> FaultKind | None:
    """Kind of the worst fault in NCCL's warnings on the rank that failed: how much they say about its own node."""
    fault = _fault(failure, state)
    return fault.kind if fault is not None else None


def explained_by_nccl(failure: Failure, state: FabricState, run: Run) -> Failure:
    """The failure in NCCL's own words too, with the peer's place, where the rank itself says no more than that a collective failed."""
    fault = _fault(failure, state)
    if fault is None:
        return failure
    node = node_at(fault.peer, state, run)
    peer = f" (the peer is node {node})" if node is not None else ""
    return replace(failure, message=f"{failure.message[:600]}; NCCL says: {fault_words(fault)}{peer}", cause=Cause.FABRIC)


def hang_explained_by_nccl(failure: Failure, state: FabricState, run: Run) -> Failure:
    """The hang with NCCL's words. A fault of the rank's own fabric is its cause. Another rank's is only mentioned: it may be the effect."""
    own = explained_by_nccl(failure, state, run)
    faults = [(rank.rank, fault) for rank in state.ranks if rank is not None and (fault := worst_fault(rank)) is not None]
    telling = [entry for entry in faults if entry[1].kind is not FaultKind.EFFECT]
    if own is not failure or not telling:
        return own
    rank, fault = min(telling, key=lambda entry: list(FaultKind).index(entry[1].kind))
    return replace(failure, message=f"{failure.message[:600]}; NCCL says on rank {rank}: {fault_words(fault)}")


def _fault(failure: Failure, state: FabricState) -> NcclFault | None:
    if failure.rank is None or failure.cause not in _WEAK or failure.exception not in {None, *_UNTELLING}:
        return None
    rank = state.ranks[failure.rank] if failure.rank < len(state.ranks) else None
    return worst_fault(rank) if rank is not None else None


def node_at(address: str, state: FabricState, run: Run) -> int | None:
    """Node that a peer's address or name belongs to."""
    if not address:
        return None
    for rank in state.ranks:
        if rank is not None and rank.address == address:
            return run.node_of(rank.rank)
    nodes = [node for node, name in enumerate(run.addresses) if name == address or name.startswith(f"{address}.")]
    return nodes[0] if len(nodes) == 1 else None
