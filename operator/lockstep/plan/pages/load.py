"""Tables of the nodes of a job and of its ranks: CPU, memory, GPUs and NICs, as `lockstep top` shows them (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep.api.objects import Object
from lockstep.plan.pages.table import aligned
from lockstep_spec.words import binary_size, duration, listed, number_of, printable_line

NICS_SHOWN = 8
IDLE_GIGABITS = 0.0005
"""Less is shown as nothing."""
NONE = "-"
NODE_COLUMNS = ("NODE", "POD", "HOST", "ON", "RANKS", "CPU", "MEMORY", "NIC", "IN Gb/s", "OUT Gb/s")
RANK_COLUMNS = ("RANK", "NODE", "CPU", "MEMORY", "GPU", "LOAD", "GPU MEMORY", "TEMP", "POWER")
NODE_DROPS = (("ON",), ("POD", "HOST"), ("NIC", "IN Gb/s", "OUT Gb/s"), ("MEMORY",))
RANK_DROPS = (("POWER",), ("TEMP",), ("NODE",), ("GPU",), ("MEMORY",))
"""Columns that a narrow terminal has no room for, the first to go first."""
MANY_RANKS = 8
"""Above so many rows the least and the greatest values come first."""


def load_page(nodes: Sequence[Object], width: int | None) -> Iterator[str]:
    """Lines about the nodes of a snapshot and their ranks. `width`: of the terminal, in characters; None: no limit."""
    yield from fitted(NODE_COLUMNS, [row for node in nodes for row in _node_rows(node)], NODE_DROPS, width)
    if ranks := [row for node in nodes for row in _rank_rows(node)]:
        yield ""
        if len(ranks) > MANY_RANKS:
            yield from _extremes(nodes)
        yield from fitted(RANK_COLUMNS, ranks, RANK_DROPS, width)
    if waiting := [node for node in nodes if node.get("notAsked")]:
        yield f"not asked yet: {number_of(len(waiting), 'node')}"
    if oldest := max((node.get("ageSeconds", 0) for node in nodes), default=0):
        yield f"nodes are asked in turn: the oldest row is from {duration(oldest)} ago"
    yield from problem_lines(nodes)


def problem_lines(nodes: Sequence[Object]) -> Iterator[str]:
    """Lines about nodes that could not be asked, and about GPUs that could not be read."""
    for key, words in (("problem", "not seen: "), ("gpuProblem", "")):
        for problem in dict.fromkeys(node[key] for node in nodes if key in node):
            yield f"{words}{listed([place_of(node) for node in nodes if node.get(key) == problem])}: {problem}"


def place_of(node: Object) -> str:
    """Name of the pod or host."""
    return str(node.get("pod") or node.get("host") or f"node {node['node']}")


def fitted(columns: Sequence[str], rows: Sequence[Sequence[str]], drops: Sequence[Sequence[str]], width: int | None) -> Iterator[str]:
    """Lines of a table. A column of which nothing is known is left out, and as many of `drops` as it takes to fit the width."""
    left_out = {name for number, name in enumerate(columns) if rows and all(row[number] in ("", NONE) for row in rows)}
    for group in ((), *drops):
        left_out |= set(group)
        chosen = [number for number, name in enumerate(columns) if name not in left_out]
        lines = list(aligned([[row[number] for number in chosen] for row in (columns, *rows)]))
        if width is None or max(map(len, lines)) <= width:
            break
    yield from lines


def _node_rows(node: Object) -> Iterator[tuple[str, ...]]:
    nics = _busiest(node.get("gigabits", {}))
    first = (
        str(node["node"]), node.get("pod", NONE), node.get("host", NONE), node.get("nodeName", NONE),
        _ranks(node), cpu_cell(node.get("cpu", {})), memory_cell(node.get("memory", {})),
    )  # fmt: skip
    yield (*first, *(nics[0] if nics else (NONE, NONE, NONE)))
    for nic in nics[1:]:
        yield ("",) * len(first) + nic


def _rank_rows(node: Object) -> Iterator[tuple[str, ...]]:
    """A row for each rank that runs there, then one for each GPU that no rank is known to use."""
    gpus = {gpu["index"]: gpu for gpu in node.get("gpus", [])}
    loads = node.get("rankLoads", [])
    for load in loads:
        cells = (str(load["rank"]), str(node["node"]), cpu_cell(load), memory_cell(load))
        yield (*cells, *gpu_cells(gpus.get(load.get("gpu"), {})))
    for index in sorted(gpus.keys() - {load.get("gpu") for load in loads}):
        yield (NONE, str(node["node"]), NONE, NONE, *gpu_cells(gpus[index]))


def _extremes(nodes: Sequence[Object]) -> Iterator[str]:
    """Line with the ranks whose values lie furthest apart: with hundreds of rows these are the ones to look at."""
    ranks = [{**load, **_gpu_used(node, load)} for node in nodes for load in node.get("rankLoads", [])]
    parts = []
    for name, words, from_, to in (
        ("percentage", "load", "{}% (rank {}) to ", "{}%"), ("celsius", "temperature", "at most ", "{} °C"),
        ("watts", "power", "at most ", "{} W"), ("cores", "CPU", "{:.1f} (rank {}) to ", "{:.1f} cores"),
    ):  # fmt: skip
        if values := [(values[name], values["rank"]) for values in ranks if name in values]:
            most, rank = max(values)
            parts.append(f"{words} {from_.format(*min(values))}{to.format(most)} (rank {rank})")
    if parts:
        yield f"of {number_of(len(ranks), 'rank')}: {', '.join(parts)}"


def _gpu_used(node: Object, load: Object) -> Object:
    return next((gpu for gpu in node.get("gpus", []) if gpu["index"] == load.get("gpu")), {})


def gpu_cells(gpu: Mapping[str, Any]) -> tuple[str, ...]:
    """Index, load, memory, temperature and power of a GPU."""
    watts = f"{gpu['watts']} W" if "watts" in gpu else NONE
    return (
        str(gpu.get("index", NONE)),
        f"{gpu['percentage']}%" if "percentage" in gpu else NONE,
        memory_cell(gpu),
        f"{gpu['celsius']} °C" if "celsius" in gpu else NONE,
        watts + (f" of {gpu['limitWatts']}" if "watts" in gpu and "limitWatts" in gpu else ""),
    )


def cpu_cell(load: Mapping[str, Any]) -> str:
    """Cores in use, of those that there are."""
    if "cores" not in load:
        return NONE
    return f"{load['cores']:.1f}" + (f" of {load['limitCores']:.3g}" if "limitCores" in load else "")


def memory_cell(load: Mapping[str, Any]) -> str:
    """Memory in use, of what there is."""
    if "bytes" not in load:
        return NONE
    return binary_size(load["bytes"]) + (f" of {binary_size(load['limitBytes'])}" if "limitBytes" in load else "")


def _busiest(gigabits: Mapping[str, Sequence[float]]) -> list[tuple[str, str, str]]:
    """NICs with traffic; the first when there is none anywhere."""
    busy = {nic: rates for nic, rates in gigabits.items() if max(rates) >= IDLE_GIGABITS} or dict(list(gigabits.items())[:1])
    return [(printable_line(nic), *map(_rate, rates)) for nic, rates in list(busy.items())[:NICS_SHOWN]]  # type: ignore[misc]


def _rate(gigabits: float) -> str:
    return "0" if gigabits < IDLE_GIGABITS else f"{gigabits:.3f}" if gigabits < 1 else f"{gigabits:.1f}"


def _ranks(node: Object) -> str:
    ranks = node["ranks"]
    text = NONE if not ranks else str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
    missing = len(set(ranks) - set(node["ranksRunning"])) if "ranksRunning" in node else 0
    return f"{text} ({missing} not running)" if missing else text
