"""NCCL's log: what a rank uses, and which faults its fabric has, line by line (pure).

Written for what NCCL 2.18 to 2.30 print; a line that isn't known changes nothing.

Lines may carry a launcher's prefix, be cut off, or hold two messages that were written at once: only a message that is whole counts,
and wording is matched by words, since spacing and source lines change with every release.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from lockstep_gang.contract.fabric import FaultKind, Hca, NcclFault, RankFabric, Traffic
from lockstep_spec.words import any_of

FAULTS = 4
"""Number of faults that are remembered of a rank: the first ones; a cause takes the place of an effect."""
TEXT = 300
_COMPLETION = re.compile(r"Got completion from peer (?P<peer>\S+?)<\d+> with (?:error |status=(?:\w+\()?)(?P<status>\d+)")
_STATUS = {4: FaultKind.LOCAL, 5: FaultKind.EFFECT, 8: FaultKind.LOCAL, 19: FaultKind.LOCAL}
"""Work completions: local protection, flushed after an earlier fault, local access, fatal. All others are between two nodes (12: no
answer).
"""
_LOCAL, _PATH, _EFFECT = FaultKind.LOCAL, FaultKind.PATH, FaultKind.EFFECT
_IB = r"^NET/g?IB(?:ext\w*)? ?: "
"""Prefix of NCCL's own network for verbs and of plugins that are made from it."""
_NO_WAY = r"(?:Network is (?:unreachable|down)|No route to host|Host is (?:unreachable|down)|Connection timed out)"
_OFI = r"^NET/OFI "
_KINDS = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (_IB + r".*(?:Got async event|[Aa]sync fatal event|Got async error event|Got non-fatal async event)", _LOCAL),
        (r"Call to ibv_modify_qp failed.*remote GID (?!N/A)(?:::ffff:)?(?P<peer>[^\s,]+)", _PATH),
        (r"Call to ibv_modify_qp failed.*" + _NO_WAY, _PATH),
        (r"Call to (?:ibv|mlx5dv)_\w+(?:\(\))? (?:failed|returned)", _LOCAL),
        (r"\bibv_post_\w+\(\) failed", _LOCAL),
        (_IB + r"No IP interface found", _LOCAL),
        (_IB + r"(?:Attempted to (?:merge|connect) incompatible|Trying to merge .* different link_layer)", _LOCAL),
        (_IB + r"(?:open|read) failed in ncclIbRoceGetVersionNum", _LOCAL),
        (_IB + r"Remote \S+ device is incompatible", _PATH),
        (_IB + r"Can't (?:merge|connect) net devices with different link_layer", _PATH),
        (_IB + r"(?:\w+: )?(?:Got CQE with error|Maximum number of probing|Could not find a functional device)", _PATH),
        (_IB + r"(?:\w+: )?(?:Fatal error|The error is fatal)", _PATH),
        (r"^Detected mixed local Net device counts", _PATH),
        (r"^MNNVL .*(?:not supported|not working) on this system", _LOCAL),
        (r"^Bootstrap ?: no socket interface found", _LOCAL),
        (r"^no device found .*verify NCCL_OOB_NET_IFNAME", _LOCAL),
        (r"^NET/Socket ?: (?:No usable listening interface|no interface) found", _LOCAL),
        (r"^Invalid NCCL_COMM_ID|ncclSocketInit: connecting to address .* with family", _LOCAL),
        (r"^Net ?: (?:No interface found in the same subnet|error encountered when getting address info)", _LOCAL),
        (r"ocketTryAccept: Accept failed", _LOCAL),
        (r"^Error: network .* not found|^Failed to initialize any NET plugin|^No transport found for rank", _LOCAL),
        (r"[Cc]onnect to (?P<peer>\S+?)<\d+> (?:failed|returned)", _PATH),
        (r"ocketPollConnect to (?P<peer>\S+?)<\d+> failed", _PATH),
        (r"connect returned .*exceeded|exceeded (?:retries|timeouts|error retry)", _PATH),
        (r"ocketPollConnect poll\(\) (?:returned|failed)", _PATH),
        (r"^Bootstrap Root ?: |^Message truncated ?: received", _PATH),
        (r"ocketFinalizeAccept(?: from (?P<peer>\S+?)<\d+>)?: wrong", _PATH),
        (r"Connection closed by remote peer (?P<peer>[^\s<]+)", _EFFECT),
        (r"Call to (?:recv from|send to) (?P<peer>\S+?)<\d+> failed ?: " + _NO_WAY, _PATH),
        (r"Call to (?:recv from|send to) (?P<peer>\S+?)<\d+> failed", _EFFECT),
        (r"Error encountered progressing operation|Failed to execute operation", _EFFECT),
        (r"encountered a fatal error|: socket progress error", _EFFECT),
        (_OFI + r".*completed with error.*(?:[Uu]nresponsive|[Uu]nreachable)", _PATH),
        # (not aborted, reset, not connected, shut down, canceled)
        (_OFI + r".*completed with error.*\b(?:RC|err): (?!(?:103|104|107|108|125)\b)", _PATH),
        (_OFI + r".*completed with error", _EFFECT),
        (_OFI + r".*(?:Unable to insert remote address|Error posting|Could not send request|Unable to issue read)", _PATH),
        (_OFI + r".*(?:call to fi_|fi_write\w* failed)", _PATH),
        (_OFI + r".*(?:Unable to|Could not) register memory", _LOCAL),
        (_OFI + r".*(?:Unable to (?:bind|enable) MR|Couldn't (?:open|create|allocate|bind|enable|register))", _LOCAL),
        (_OFI + r"(?:.*fi_getinfo\(\) call failed|No (?:viable|eligible)|Creating new endpoint .* failed)", _LOCAL),
        (_OFI + r"(?:Unable to find a protocol|Failed to initialize \w+ protocol)", _LOCAL),
        (_OFI + r"(?:aws-ofi-nccl initialization failed|GDR support reported .* couldn't be configured)", _LOCAL),
    )
)
_HARMLESS = any_of(
    r"event ?: (?:port active|GID table change|LID change|P_Key change|SM change|client reregistration|path migrated)",
    r"event ?: (?:communication established|send queue drained|last WQE reached|SRQ limit reached)",
    r"Call to ibv_(?:open_device|query_device|query_port\w*) failed",
    _IB[1:] + r"Unable to (?:open|query)",
    flags=re.IGNORECASE,
)
"""Events that change nothing, and devices that NCCL leaves out: whether it then lacks one that was asked for is the verdict's to say."""


def fault_of(text: str) -> NcclFault | None:
    """The fault that a warning tells of; None: it is not about the fabric (a CUDA error, a GPU given twice), or harmless."""
    completion = _COMPLETION.search(text)
    if completion:
        return NcclFault(_STATUS.get(int(completion["status"]), FaultKind.PATH), text[:TEXT], completion["peer"])
    if _HARMLESS.search(text):
        return None
    for pattern, kind in _KINDS:
        match = pattern.search(text)
        if match:
            peers = [value for value in match.groupdict().values() if value]
            return NcclFault(kind, text[:TEXT], peers[0] if peers else "")
    return None


def with_fault(rank: RankFabric, text: str) -> RankFabric:
    fault = fault_of(text)
    if fault is None or any((other.kind, other.peer) == (fault.kind, fault.peer) for other in rank.faults):
        return rank
    faults = list(rank.faults)
    if len(faults) >= FAULTS:
        effects = [other for other in faults if other.kind is FaultKind.EFFECT]
        if not effects or fault.kind is FaultKind.EFFECT:
            return rank
        faults.remove(effects[-1])
    return replace(rank, faults=(*faults, fault))


def worst_fault(rank: RankFabric) -> NcclFault | None:
    """The first of the kind that says most about its cause; of that kind, one that names the peer."""
    order = list(FaultKind)
    return min(rank.faults, key=lambda fault: (order.index(fault.kind), not fault.peer), default=None)


def fault_words(fault: NcclFault) -> str:
    """Return NCCL's own words, with their meaning where the kernel's error alone stands for it."""
    unreachable = "ibv_modify_qp" in fault.text and ("Network is unreachable" in fault.text or "No route to host" in fault.text)
    return f"{fault.text} (the subnets of the two NICs have no route to each other)" if unreachable else fault.text


_FUNCTION = r"(?:\S+|[^\[\]]+\)(?: const)?):\d+ +(?:\([\w:~<>]+\) +)?"
_HEAD = re.compile(rf"[^\s:]+:\d+:\d+ +\[-?\d+\] +(?:{_FUNCTION})?NCCL (INFO|WARN|TRACE|VERSION) ?")
"""Beginning of a message. Before a warning stand its file or function and line; a plugin in C++ writes the function's whole signature."""
_VERSION = re.compile(r"\bNCCL version (\d+\.\d+(?:\.\d+)?)")
_HCA = re.compile(r"\[\d+\]\s*([\w.-]+):(\d+)(?::\d*(?::\d+)?)?/(IB|RoCE)\b")
_SOCKET = re.compile(r"\[\d+\]([\w.@-]+):([^\s<]+)<\d+>")
_VIA_NET = re.compile(r"\[(send|receive)\] via NET/(.+?)/(\d+)(?:\(\d+\))?((?:/\w+|\(\w+\))*)\s*$")
_LIST = 32
_CHARACTERS = 200
SETTINGS = frozenset(
    f"NCCL_{name}"
    for name in (
        "NET", "NET_PLUGIN", "IB_DISABLE", "IB_HCA", "IB_GID_INDEX", "IB_TC", "IB_SL", "IB_ADDR_FAMILY", "IB_ROCE_VERSION_NUM",
        "NET_GDR_LEVEL", "NET_GDR_READ", "DMABUF_ENABLE", "SOCKET_IFNAME", "CROSS_NIC", "P2P_DISABLE", "SHM_DISABLE",
    )
)  # fmt: skip
"""Variables that decide about the fabric; NCCL echoes those that are set, from its configuration files too."""

LogMatch = re.Match[str]


def messages(line: str) -> Iterator[tuple[str, str]]:
    """(level, message) of what is whole in a line: the last of several messages written at once; a version in a line without a head."""
    heads = list(_HEAD.finditer(line))
    if heads:
        yield heads[-1][1], line[heads[-1].end() :].strip()
    elif _VERSION.search(line):
        yield "VERSION", line.strip()


def read_line(rank: RankFabric, line: str) -> RankFabric:
    """The rank's fabric after one more line of its log."""
    for level, text in messages(line):
        if level == "WARN":
            rank = with_fault(rank, text)
        for pattern, take in _TAKERS:
            match = pattern.search(text)
            if match:
                rank = take(rank, match)
                break
    return rank


def _more(values: tuple[str, ...], new: str) -> tuple[str, ...]:
    return values if new in values or len(values) >= _LIST else (*values, new[:_CHARACTERS])


def _bootstrap(rank: RankFabric, match: LogMatch) -> RankFabric:
    return rank if rank.interface else replace(rank, interface=match[1], address=match[2])


def _hcas(rank: RankFabric, match: LogMatch) -> RankFabric:
    """Take the last whole list. It ends with the interface by which the NICs' connections are made, unless the line was cut off."""
    if "OOB " not in match[1] and rank.hcas_whole:
        return rank
    speeds = {hca.name: hca.speed_mbps for hca in rank.hcas}
    listed = dict.fromkeys((m[1], int(m[2]), m[3]) for m in _HCA.finditer(match[1]))
    hcas = tuple(Hca(name, port, link, speeds.get(name)) for name, port, link in list(listed)[: 2 * _LIST])
    rank = replace(rank, hcas=hcas, hcas_whole="OOB " in match[1])
    return rank if hcas or not rank.hcas_whole else _no_device(rank, match)


def _no_device(rank: RankFabric, match: LogMatch) -> RankFabric:
    return rank if rank.no_devices else replace(rank, hcas=(), hcas_whole=True, no_devices="NCCL found no RDMA device")


def _speed(rank: RankFabric, match: LogMatch) -> RankFabric:
    name, speed = match["name"], int(match["speed"])
    return replace(rank, hcas=tuple(replace(hca, speed_mbps=speed) if hca.name == name else hca for hca in rank.hcas))


def _sockets(rank: RankFabric, match: LogMatch) -> RankFabric:
    return replace(rank, interfaces=tuple(dict.fromkeys(m[1] for m in _SOCKET.finditer(match[1])))[:_LIST])


def _direct_of_nic(rank: RankFabric, match: LogMatch) -> RankFabric:
    if match[1] == "Enabled":
        return replace(rank, direct_able=True)
    return replace(rank, direct_off=f"NCCL found neither nvidia-peermem nor DMA-BUF for {match[2]}"[:_CHARACTERS])


def _direct_of_pair(rank: RankFabric, match: LogMatch) -> RankFabric:
    if match[1] == "Enabled" or rank.direct_off:
        return rank
    return replace(
        rank, direct_off=f"GPU and NIC are too far from each other (distance {match[2]}, allowed {match[3]}: NCCL_NET_GDR_LEVEL)"
    )


def _dmabuf(rank: RankFabric, match: LogMatch) -> RankFabric:
    return rank if rank.direct_by else replace(rank, direct_by="DMA-BUF")


def _channel(rank: RankFabric, match: LogMatch) -> RankFabric:
    direction, network, marks = match[1], match[2], match[4].strip("/").split("/")
    if any(mark and mark != "GDRDMA" and "GDRDMA".startswith(mark) for mark in marks):
        return rank  # cut off within the word that counts
    direct = any(mark.startswith("GDRDMA") for mark in marks)
    counted = next((t for t in rank.traffic if t.network == network), Traffic(network[:_CHARACTERS]))
    if direction == "receive":
        counted = replace(counted, received=counted.received + 1, received_direct=counted.received_direct + direct)
    else:
        counted = replace(counted, sent=counted.sent + 1, sent_direct=counted.sent_direct + direct)
    return replace(rank, traffic=(*(t for t in rank.traffic if t.network != network), counted)[-_LIST:])


def _setting(rank: RankFabric, match: LogMatch) -> RankFabric:
    name, value = match[1], match[2].strip()
    if name not in SETTINGS:
        return rank
    value = value[:-1] if re.fullmatch(r"-?\d+\.", value) else value  # NCCL ends a sentence after a number
    return replace(rank, settings=_more(tuple(s for s in rank.settings if not s.startswith(f"{name}=")), f"{name}={value}"))


def _plugin_failed(rank: RankFabric, match: LogMatch) -> RankFabric:
    if match[1] in ("IB", "Socket"):
        return rank  # NCCL's own, which say why themselves
    return replace(rank, plugin_failed=match[0].strip()[:_CHARACTERS])


def _plugin_missing(rank: RankFabric, match: LogMatch) -> RankFabric:
    """Note a missing plugin, which is normal unless somebody asked for one."""
    is_asked_for = any(s.startswith("NCCL_NET_PLUGIN=") and s != "NCCL_NET_PLUGIN=none" for s in rank.settings)
    return replace(rank, plugin_failed=match[0].strip()[:_CHARACTERS]) if is_asked_for else rank


def _gid(rank: RankFabric, match: LogMatch) -> RankFabric:
    gid = int(match[1])
    return rank if gid in rank.gids or len(rank.gids) >= _LIST else replace(rank, gids=(*rank.gids, gid))


def _put(field: str, words: str = r"\1") -> Callable[[RankFabric, LogMatch], RankFabric]:
    """Taker of the first group, or of these words, as the field's value."""
    return lambda rank, match: _with(rank, field, match.expand(words).strip()[:_CHARACTERS])


def _add(field: str, words: str = r"\1") -> Callable[[RankFabric, LogMatch], RankFabric]:
    """Taker of the first group, or of these words with it, as one more of the field's values."""
    return lambda rank, match: _with(rank, field, _more(getattr(rank, field), match.expand(words).strip()))


def _with(rank: RankFabric, field: str, value: Any) -> RankFabric:
    return replace(rank, **{field: value})


_TAKERS: tuple[tuple[re.Pattern[str], Callable[[RankFabric, LogMatch], RankFabric]], ...] = (
    (_VIA_NET, _channel),
    (re.compile(r"\bvia (SHM|P2P/[A-Za-z]+)"), _add("inside")),
    (re.compile(r"^Using network (\S.*)$"), _add("networks")),
    (re.compile(r"^Bootstrap ?: Using ([^\s:]+):(.+?)<\d+>"), _bootstrap),
    (re.compile(r"^NET/IB ?: No device found"), _no_device),
    (re.compile(r"^(?:Failed to open|Count not open|Could not open) \S*libibverbs"), _put("no_devices", "libibverbs could not be opened")),
    (re.compile(r"^NET/IB ?: Using (.*)$"), _hcas),
    (re.compile(r"^NET/IB ?: Made virtual device \[\d+\] name=(?P<name>\S+) speed=(?P<speed>\d+)"), _speed),
    (re.compile(r"^NET/IB ?: \[\d+\] (?P<name>[\w.-]+):\S*?:\d+/\w+ .*\bspeed=(?P<speed>\d+)"), _speed),
    (re.compile(r"^NET/Socket ?: Using (.*)$"), _sockets),
    (re.compile(r"GPU Direct RDMA (Enabled|Disabled) for HCA \d+ '([^']+)"), _direct_of_nic),
    (re.compile(r"GPU Direct RDMA (Enabled|Disabled) for GPU.*\(distance (\d+) (?:<=|>) (\d+)"), _direct_of_pair),
    (re.compile(r"GPU Direct RDMA \((nvidia-peermem)\) enabled for HCA"), _put("direct_by")),
    (re.compile(r"GPU Direct RDMA \(DMABUF\) enabled for HCA"), _put("direct_by", "DMA-BUF")),
    (re.compile(r"^DMA-BUF is available on GPU device"), _dmabuf),
    (re.compile(r"^NET/OFI Support for DMA-BUF registrations: false"), _put("direct_by", "On")),  # NCCL's word is about the GPU alone
    (re.compile(r"^(NCCL_\w+) set(?: by environment)? to (.*)$"), _setting),
    (re.compile(r"Plugin name set by env to (\S+)"), _add("settings", r"NCCL_NET_PLUGIN=\1")),
    (re.compile(r"NET/Plugin ?: Loaded net plugin (.+?) \(v\d+\)"), _put("plugin")),
    (re.compile(r"Successfully loaded external (?:network )?plugin (\S+)"), _put("plugin")),
    (re.compile(r"Failed to initialize NET plugin (\S.*)$"), _plugin_failed),
    (re.compile(r"External network plugin (\S+) is unsupported"), _plugin_failed),
    (re.compile(r"NET/Plugin ?: (?:Plugin load .*returned|.*No plugin found|Could not find: \S).*"), _plugin_missing),
    (re.compile(r"NET/OFI Selected provider is ([\w;.-]+)", re.IGNORECASE), _put("provider")),
    (re.compile(r"^NET/IB ?: .*\bqpn \d+ .*\bGID (\d+) \("), _gid),
    (_VERSION, _put("version")),
)
