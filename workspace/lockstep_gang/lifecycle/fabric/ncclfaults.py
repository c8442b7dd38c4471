"""NCCL's warnings about the fabric: how much each says about its own node, and which peer it names (pure)."""

from __future__ import annotations

import re
from dataclasses import replace

from lockstep_gang.contract.fabric import FaultKind, NcclFault, RankFabric

FAULTS = 4
"""Remembered of a rank: the first ones; a cause takes the place of an effect."""
TEXT = 300
_COMPLETION = re.compile(r"Got completion from peer (?P<peer>\S+?)<\d+> with (?:error |status=(?:\w+\()?)(?P<status>\d+)")
_STATUS = {4: FaultKind.LOCAL, 5: FaultKind.EFFECT, 8: FaultKind.LOCAL, 19: FaultKind.LOCAL}
"""Work completions: local protection, flushed after an earlier fault, local access, fatal. All others are between two nodes (12: no answer)."""
_LOCAL, _PATH, _EFFECT = FaultKind.LOCAL, FaultKind.PATH, FaultKind.EFFECT
_KINDS = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"^NET/IB ?: .*(?:Got async event|[Aa]sync fatal event|Got async error event|Got non-fatal async event)", _LOCAL),
        (r"Call to ibv_modify_qp failed.*remote GID (?:::ffff:)?(?P<peer>[^\s,]+)", _PATH),
        (r"Call to ibv_\w+ failed", _LOCAL),
        (r"^NET/IB ?: (?:No IP interface found|Unable to (?:open|query)|Attempted to (?:merge|connect) incompatible)", _LOCAL),
        (r"^NET/IB ?: Got CQE with error", _PATH),
        (r"^Bootstrap ?: no socket interface found", _LOCAL),
        (r"^NET/Socket ?: (?:No usable listening interface|no interface) found", _LOCAL),
        (r"^Invalid NCCL_COMM_ID|ncclSocketInit: connecting to address .* with family", _LOCAL),
        (r"^Error: network .* not found|^Failed to initialize any NET plugin|^No transport found for rank", _LOCAL),
        (r"Connect to (?P<peer>\S+?)<\d+> failed|connect to (?P<peer2>\S+?)<\d+> returned .*exceeded", _PATH),
        (r"connect returned .*exceeded|exceeded (?:retries|timeouts|error retry)", _PATH),
        (r"^Bootstrap Root ?: |^Message truncated ?: received|wrong magic", _PATH),
        (r"Connection closed by remote peer (?P<peer>[^\s<]+)", _EFFECT),
        (r"Call to (?:recv from|send to) (?P<peer>\S+?)<\d+> failed", _EFFECT),
        (r"Error encountered progressing operation|Failed to execute operation|encountered a fatal error", _EFFECT),
    )
)  # fmt: skip
_HARMLESS = re.compile(r"async event ?: port active|event: port active", re.IGNORECASE)


def fault_of(text: str) -> NcclFault | None:
    """The fault that a warning tells of; None: it is not about the fabric (a CUDA error, a GPU given twice), or harmless."""
    completion = _COMPLETION.search(text)
    if completion:
        return NcclFault(_STATUS.get(int(completion["status"]), FaultKind.PATH), text[:TEXT], completion["peer"])
    if _HARMLESS.search(text):
        return None
    for pattern, kind in _KINDS:
        found = pattern.search(text)
        if found:
            peers = [value for value in found.groupdict().values() if value]
            return NcclFault(kind, text[:TEXT], peers[0] if peers else "")
    return None


def with_fault(rank: RankFabric, text: str) -> RankFabric:
    fault = fault_of(text)
    if fault is None or any((known.kind, known.peer) == (fault.kind, fault.peer) for known in rank.faults):
        return rank
    kept = list(rank.faults)
    if len(kept) >= FAULTS:
        effects = [known for known in kept if known.kind is FaultKind.EFFECT]
        if not effects or fault.kind is FaultKind.EFFECT:
            return rank
        kept.remove(effects[-1])
    return replace(rank, faults=(*kept, fault))


def worst_fault(rank: RankFabric) -> NcclFault | None:
    """The first of the kind that says most about its cause; of that kind, one that names the peer."""
    order = list(FaultKind)
    return min(rank.faults, key=lambda fault: (order.index(fault.kind), not fault.peer), default=None)
