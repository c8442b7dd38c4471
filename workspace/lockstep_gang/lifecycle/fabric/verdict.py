"""The verdict on a gang's fabric: what the job asked for against what all ranks' NCCL says (pure).

False only by what NCCL wrote. True only when every rank has named its network and every node has a channel to another one: a list of
NICs is not their use. Anything between is Unknown, with the reason.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

from lockstep_gang.contract.fabric import DifferingRanks, FabricAsked, FabricReason, FabricReport, RankFabric, Verified
from lockstep_gang.contract.run import Run
from lockstep_gang.lifecycle.fabric.rank_fabric import (
    NVLINK,
    PLUGIN,
    RDMA,
    TCP,
    direct_by,
    extra_hcas,
    has_spoken,
    has_traffic,
    missing_hcas,
    transport_of,
    uses_direct,
    why_not_direct,
    why_sockets,
)
from lockstep_spec.words import clauses, listed

RankFabrics = tuple[RankFabric | None, ...]
DIFFERING, WHY = 32, 400
GLOO = "gloo"


def verdict(run: Run, ranks: RankFabrics, *, steps_done: bool = False) -> FabricReport | None:
    """Verdict on the fabric; None: run.json does not say what was asked. `steps_done`: ranks have trained for a while, so NCCL has had its
    say.
    """
    asked = run.fabric
    if asked is None:
        return None
    if run.gpus_per_node == 0:
        return _gloo(asked, ranks)
    if run.nodes == 1:
        return _report(run, ranks, Verified.UNKNOWN, FabricReason.SINGLE_NODE, "one node: nothing crosses the network")
    return _broken(run, asked, ranks) or _not_known(run, ranks, steps_done) or _verified(run, ranks)


def _gloo(asked: FabricAsked, ranks: RankFabrics) -> FabricReport:
    interfaces = tuple(dict.fromkeys(rank.interface for rank in ranks if rank is not None and rank.interface))
    over = f" (over {names_words(interfaces)})" if interfaces else ""
    extra = "; RDMA was asked for, which gloo does not have" if asked.transport == RDMA else ""
    message = f"CPU ranks over gloo{over}: nothing to verify{extra}"
    return FabricReport(Verified.UNKNOWN, FabricReason.GLOO, message, transport=GLOO, interfaces=interfaces)


def _broken(run: Run, asked: FabricAsked, ranks: RankFabrics) -> FabricReport | None:
    """The first thing that is not as asked, with all ranks of which that holds."""
    checks = _rdma_checks(asked) if asked.transport == RDMA else _TCP_CHECKS
    for reason, opening, why in checks:
        problems = {rank.rank: problem for rank in ranks if rank is not None and (problem := why(rank)) is not None}
        if problems:
            return _differs(run, ranks, reason, f"{opening}, ", problems)
    differing = _unequal(run, ranks) if all(has_spoken(rank) for rank in ranks) else {}
    return _differs(run, ranks, FabricReason.RANKS_DIFFER, "", differing) if differing else None


FabricCheck = tuple[FabricReason, str, Callable[[RankFabric], str | None]]


def _rdma_checks(asked: FabricAsked) -> Iterator[FabricCheck]:
    yield FabricReason.FELL_BACK_TO_TCP, "asked for RDMA", _sockets
    yield FabricReason.HCA_SUBSET, "asked for RDMA over all rails", lambda rank: _lacking(rank, asked)
    if asked.gpu_direct:
        yield FabricReason.GPU_DIRECT_DISABLED, "asked for GPUDirect RDMA", _not_direct


def _sockets(rank: RankFabric) -> str | None:
    if transport_of(rank) != TCP:
        return None
    over = names_words(rank.interfaces or ((rank.interface,) if rank.interface else ()))
    why = why_sockets(rank)
    return "use sockets" + (f" ({over})" if over else "") + (f": {why}" if why else "")


def _lacking(rank: RankFabric, asked: FabricAsked) -> str | None:
    if transport_of(rank) != RDMA or not rank.hcas_whole or not rank.hcas:
        return None
    has, missing = names_words(hca.name for hca in rank.hcas), missing_hcas(rank, asked.hcas)
    if missing:
        return f"have {has} and lack {names_words(missing)}"
    names = {hca.name.removesuffix("_dma") for hca in rank.hcas}
    return f"have {len(names)} RDMA devices ({has}) for {asked.rails} rails" if len(names) < asked.rails else None


def _not_direct(rank: RankFabric) -> str | None:
    if transport_of(rank) != RDMA or uses_direct(rank) is not False:
        return None
    why = why_not_direct(rank)
    return "go through host memory" + (f": {why}" if why else "")


def _rdma_though_tcp(rank: RankFabric) -> str | None:
    return f"use {rank.networks[-1]}" if rank.networks and transport_of(rank) in (RDMA, PLUGIN) else None


_TCP_CHECKS: tuple[FabricCheck, ...] = ((FabricReason.OTHER_TRANSPORT, "asked for TCP", _rdma_though_tcp),)


def _unequal(run: Run, ranks: RankFabrics) -> dict[int, str]:
    """Ranks that are not like most, and in what. What a rank does not say is not compared."""
    differences: dict[int, str] = {}
    fabrics = [rank for rank in ranks if rank is not None]
    views: tuple[tuple[Callable[[RankFabric], object], Callable[[RankFabric], str]], ...] = (
        (transport_of, lambda rank: f"use {transport_of(rank)}"),
        (_link, lambda rank: f"have {_link(rank)}"),
        (_device_count, lambda rank: f"have {_device_count(rank)} RDMA devices ({names_words(hca.name for hca in rank.hcas)})"),
        (lambda rank: rank.version or None, lambda rank: f"have NCCL {rank.version}"),
    )
    for value, words in views:
        usual = _most(value(rank) for rank in fabrics)
        for rank in fabrics:
            if rank.rank not in differences and value(rank) not in (None, usual):
                differences[rank.rank] = f"{words(rank)}, unlike most"[:WHY]
    return differences or _unequally_direct(run, fabrics)


def _unequally_direct(run: Run, fabrics: list[RankFabric]) -> dict[int, str]:
    """Ranks that go through host memory, unlike those in their place on other nodes. GPUs of one node may be at different distances from
    its NICs.
    """
    place = run.layout.local_rank_of
    able = {place(rank.rank) for rank in fabrics if uses_direct(rank)}
    return {
        rank.rank: f"go through host memory, unlike those of other nodes{_because(why_not_direct(rank))}"[:WHY]
        for rank in fabrics
        if uses_direct(rank) is False and place(rank.rank) in able
    }


def _because(why: str) -> str:
    return f" ({why})" if why else ""


def _most(values: Iterator[object]) -> object:
    counted = Counter(value for value in values if value is not None)
    return counted.most_common(1)[0][0] if counted else None


def _link(rank: RankFabric) -> str | None:
    links = {hca.link for hca in rank.hcas}
    return "/".join(sorted(links)) if links and transport_of(rank) == RDMA else None


def _device_count(rank: RankFabric) -> int | None:
    return len({hca.name for hca in rank.hcas}) if rank.hcas and rank.hcas_whole and transport_of(rank) == RDMA else None


def _differs(run: Run, ranks: RankFabrics, reason: FabricReason, opening: str, problems: dict[int, str]) -> FabricReport:
    groups: dict[tuple[int, str], list[int]] = {}
    for rank, why in problems.items():
        groups.setdefault((run.node_of(rank), why), []).append(rank)
    same = {why for _, why in groups}
    if len(problems) == run.world_size and len(same) == 1:
        message = f"{opening}all {run.world_size} ranks {same.pop()}"
    else:
        parts = [f"{ranks_words(members)} on node {node} {_agreeing(why, members)}" for (node, why), members in groups.items()]
        message = opening + clauses(parts)
    differing = tuple(DifferingRanks(node, number_runs(members), why[:WHY]) for (node, why), members in groups.items())[:DIFFERING]
    return _report(run, ranks, Verified.FALSE, reason, message, differing)


_SINGULAR = {"use": "uses", "have": "has", "go": "goes", "do": "does"}


def _agreeing(why: str, members: list[int]) -> str:
    """The words in agreement with their number: one rank uses, several use."""
    verb, _, rest = why.partition(" ")
    return f"{_SINGULAR.get(verb, verb)} {rest}" if len(members) == 1 else why


def _not_known(run: Run, ranks: RankFabrics, steps_done: bool) -> FabricReport | None:
    unread = {rank.rank: rank.unread for rank in ranks if rank is not None and rank.unread}
    if unread:
        why = f"{ranks_words(unread)}: {next(iter(unread.values()))}"
        return _report(run, ranks, Verified.UNKNOWN, FabricReason.NO_LOG, f"NCCL's log is not read on {why}")
    silent = [index for index, rank in enumerate(ranks) if not has_spoken(rank)]
    if silent and steps_done:
        message = f"{ranks_words(silent)} train and NCCL has not logged which network they use: it is not in use there, or logs elsewhere"
        return _report(run, ranks, Verified.UNKNOWN, FabricReason.NO_LOG, message)
    plugins = {rank.networks[-1] for rank in ranks if rank is not None and rank.networks and transport_of(rank) == PLUGIN}
    if not silent and plugins:
        message = f"the plugin {names_words(sorted(plugins))} carries the traffic and does not log over what"
        return _report(run, ranks, Verified.UNKNOWN, FabricReason.PLUGIN_TRANSPORT, message)
    nodes = {run.node_of(index) for index, rank in enumerate(ranks) if has_traffic(rank)}
    if silent or len(nodes) < run.nodes:
        return _report(run, ranks, Verified.UNKNOWN, FabricReason.WAITING, "NCCL has not yet logged connections between all nodes")
    return None


def _verified(run: Run, ranks: RankFabrics) -> FabricReport:
    summary = _report(run, ranks, Verified.TRUE, FabricReason.VERIFIED, "")
    words = [
        _carried(summary),
        *_extra_words(run, ranks),
        *_direct_words(summary, ranks),
        f"verified on {summary.ranks_heard} of {run.world_size} ranks",
    ]
    return _report(run, ranks, Verified.TRUE, FabricReason.VERIFIED, ", ".join(words))


def _carried(summary: FabricReport) -> str:
    if summary.transport == NVLINK:
        return "NVLink between nodes (MNNVL)"
    if summary.transport == RDMA:
        by = names_words(summary.hcas) if summary.hcas else summary.network
        return f"RDMA over {by}" + (f" ({summary.link})" if summary.link else "")
    return f"TCP over {names_words(summary.interfaces)}" if summary.interfaces else "TCP"


def _extra_words(run: Run, ranks: RankFabrics) -> Iterator[str]:
    asked = run.fabric.hcas if run.fabric is not None else ()
    extra = [name for rank in ranks if rank is not None and transport_of(rank) == RDMA for name in extra_hcas(rank, asked)]
    if extra:
        why = "" if asked[0].startswith("=") else "NCCL treats names as prefixes, unless the list starts with ="
        yield f"though nobody asked for {names_words(extra)}{_because(why)}"


def _direct_words(summary: FabricReport, ranks: RankFabrics) -> Iterator[str]:
    if summary.gpu_direct == "Off":
        why = next((w for rank in ranks if rank is not None and uses_direct(rank) is False and (w := why_not_direct(rank))), "")
        yield "without GPUDirect" + _because(why)
    elif summary.gpu_direct == "On":
        yield "with GPUDirect"
    elif summary.gpu_direct is not None:
        yield f"GPUDirect by {summary.gpu_direct}"


def _report(
    run: Run, ranks: RankFabrics, verified: Verified, reason: FabricReason, message: str, differing: tuple[DifferingRanks, ...] = ()
) -> FabricReport:
    fabrics = [rank for rank in ranks if rank is not None]
    transport = _transport(fabrics)
    return FabricReport(
        verified=verified,
        reason=reason,
        message=message,
        transport=transport,
        network=next((rank.networks[-1] for rank in fabrics if rank.networks), None),
        hcas=tuple(dict.fromkeys(hca.name for rank in fabrics for hca in rank.hcas)) if transport == RDMA else (),
        link=_link_words(fabrics) if transport == RDMA else None,
        interfaces=tuple(dict.fromkeys(name for rank in fabrics for name in _interfaces(rank, transport))),
        gpu_direct=_gpu_direct(fabrics),
        nccl_version=next((rank.version for rank in fabrics if rank.version), None),
        ranks_heard=sum(has_spoken(rank) for rank in ranks),
        differing=differing,
    )


def _transport(fabrics: list[RankFabric]) -> str | None:
    """Slowest transport that is in use."""
    kinds = {transport_of(rank) for rank in fabrics}
    return next((kind for kind in (TCP, PLUGIN, RDMA, NVLINK) if kind in kinds), None)


def _interfaces(rank: RankFabric, transport: str | None) -> tuple[str, ...]:
    return rank.interfaces if rank.interfaces and transport == TCP else ((rank.interface,) if rank.interface else ())


def _link_words(fabrics: list[RankFabric]) -> str | None:
    links = sorted({hca.link for rank in fabrics for hca in rank.hcas})
    speeds = {hca.speed_mbps for rank in fabrics for hca in rank.hcas}
    speed = speeds.pop() if len(speeds) == 1 else None
    rate = f", {speed // 1000} Gb/s" if speed and speed % 1000 == 0 else f", {speed} Mb/s" if speed else ""
    return "/".join(links) + rate if links else None


def _gpu_direct(fabrics: list[RankFabric]) -> str | None:
    used = {uses_direct(rank) for rank in fabrics} - {None}
    if not used:
        return None
    by = {direct_by(rank) for rank in fabrics if uses_direct(rank)}
    return "Off" if False in used else (by.pop() or "On" if len(by) == 1 else "On")


_NUMBERED = re.compile(r"^(.*?)(\d+)$")


def number_runs(numbers: Iterable[int]) -> str:
    """Numbers in runs: `0–3, 6`."""
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in _runs(sorted(set(numbers))))


def ranks_words(ranks: Iterable[int]) -> str:
    """Ranks in runs: `rank 4`, or `ranks 4–7`."""
    numbers = list(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {number_runs(numbers)}"


def names_words(names: Iterable[str]) -> str:
    """Names in runs: `mlx5_0..3, mlx5_6`. Three and more that follow each other are one."""
    distinct = list(dict.fromkeys(names))
    numbered = {name: (m[1], int(m[2])) for name in distinct if (m := _NUMBERED.match(name))}
    words: list[str] = [name for name in distinct if name not in numbered]
    for prefix in dict.fromkeys(prefix for prefix, _ in numbered.values()):
        for first, last in _runs(sorted(number for p, number in numbered.values() if p == prefix)):
            words += [f"{prefix}{first}..{last}"] if last - first >= 2 else [f"{prefix}{n}" for n in range(first, last + 1)]
    return listed(words)


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    for _, run in groupby(enumerate(numbers), lambda item: item[1] - item[0]):  # the same for all that follow each other
        members = [number for _, number in run]
        yield members[0], members[-1]
