"""Evaluation of the measurements of peers.py: counts of writes, statistics, verdicts on the goals, tables. Nothing in here starts or asks
anything.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
LOCKSTEP, JOBSET, TRAINER = SYSTEMS = ("Lockstep", "JobSet", "Trainer")
OWN, OTHERS = "own", "kube-controller-manager"
FAULTS = {"exit": "exit 1", "delete": "pod deleted by force", "hang": "hang"}
WRONG_IMAGE = "an image that is not there"
SAID_CHARACTERS = 300
WRITING_VERBS = frozenset({"create", "update", "patch", "delete", "deletecollection"})
BEATING_SECONDS = 0.6
"""A process that was heard of so recently runs."""
REFUSED = 400
"""The lowest code of a request that was refused."""


def count_writes(audit_lines: Iterable[str], namespace: str, own: Collection[str]) -> Counter[str]:
    """Writes to a namespace, as "own create pods" or "kube-controller-manager patch pods/status (409)": who, verb, resource, and the code
    if it was refused.

    `own` are the users that count as the system's own controllers. Leases are left out: they are not written for a job.
    """
    counts: Counter[str] = Counter()
    for line in audit_lines:
        event = json.loads(line)
        target = event.get("objectRef") or {}
        is_write = event.get("stage") == "ResponseComplete" and event.get("verb") in WRITING_VERBS
        if not is_write or target.get("namespace") != namespace or target.get("resource") == "leases":
            continue
        resource = "/".join(filter(None, (target.get("resource"), target.get("subresource"))))
        code = (event.get("responseStatus") or {}).get("code", 0)
        author = OWN if event["user"]["username"] in own else OTHERS
        counts[f"{author} {event['verb']} {resource}" + (f" ({code})" if code >= REFUSED else "")] += 1
    return counts


def writes_per_job(counts: Mapping[str, int], jobs: int) -> Object:
    """The totals and every kind of write, for one job."""
    kinds = {name: round(count / jobs, 2) for name, count in sorted(counts.items())}
    own = sum(count for name, count in counts.items() if name.startswith(f"{OWN} "))
    total = sum(counts.values())
    return {"total": round(total / jobs, 1), OWN: round(own / jobs, 1), OTHERS: round((total - own) / jobs, 1), "kinds": kinds}


def percentiles(seconds: Sequence[float]) -> Object:
    """Percentiles in milliseconds. With few runs the high ones are the maximum."""
    ordered = sorted(seconds)
    high = {f"p{percent}": ordered[min(len(ordered) - 1, percent * len(ordered) // 100)] for percent in (95, 99)}
    return {name: round(1000 * value, 1) for name, value in {"p50": statistics.median(ordered), **high}.items()} | {"n": len(ordered)}


def spread(values: Sequence[float]) -> Object:
    return {"median": round(statistics.median(values), 2), "min": round(min(values), 2), "max": round(max(values), 2), "n": len(values)}


@dataclass(frozen=True)
class Life:
    """One process of a job: its rank, when it began, when it last gave a sign of life, and when it did what it was told to (exit, hang)."""

    rank: str
    began: float
    last: float
    obeyed: float | None = None


def life(name: str, text: str) -> Life | None:
    """Read a heartbeat file: called RANK-BEGAN, one line a beat, "exit TIME" or "hang TIME" at the end. None before the first beat."""
    rank, _, began = name.partition("-")
    words = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    if not words:
        return None
    return Life(rank, float(began), float(words[-1][-1]), float(words[-1][1]) if len(words[-1]) > 1 else None)


def running(lives: Iterable[Life], now: float, ranks: int) -> list[Life]:
    """The processes that beat, when every rank has one; else nothing."""
    beating = [one for one in lives if one.obeyed is None and now - one.last < BEATING_SECONDS]
    return beating if len({one.rank for one in beating}) == ranks else []


@dataclass(frozen=True)
class Outcome:
    """Result of a fault, in seconds from it. `survivor_stopped` is None while the survivor runs, `all_run_again` until all run.

    `victim_again`: the rank that had the fault runs again, whatever the others do.
    """

    survivor_stopped: float | None
    all_run_again: float | None
    victim_again: float | None


def outcome(lives: Sequence[Life], victim: str, fault: float, now: float) -> Outcome:
    later = [one for one in lives if one.began > fault]
    replaced = {one.rank for one in later}
    survivors = [one for one in lives if one.rank != victim and one.began < fault]
    ended = all(one.rank in replaced or now - one.last > BEATING_SECONDS for one in survivors)
    beating = running(later, now, len({one.rank for one in lives}))
    victims = [one.began - fault for one in later if one.rank == victim]
    return Outcome(
        max([0.0, *(one.last - fault for one in survivors)]) if ended else None,
        max(one.began for one in beating) - fault if beating else None,
        min(victims, default=None),
    )


def conditions(status: Object) -> list[str]:
    """Conditions as text for a person."""
    return [
        f"{one['type']}={one['status']} {one.get('reason', '')}: {one.get('message', '')}".rstrip(": ")
        for one in status.get("conditions", ())
    ]


@dataclass(frozen=True)
class Goal:
    """`met` is None when nothing was measured for it."""

    name: str
    measured: str
    bound: str
    met: bool | None

    def __str__(self) -> str:
        verdict = {True: "met", False: "NOT MET", None: "not measured"}[self.met]
        return f"{verdict:12}  {self.name}: {self.measured or '-'} (goal: {self.bound})"


def at(result: Object, *keys: str) -> Any:
    """Value below these keys; None if one of them is missing."""
    place: Any = result
    for key in keys:
        place = place.get(key) if isinstance(place, Mapping) else None
    return place


def goals(result: Object) -> list[Goal]:
    """Lockstep's goals beside the measurements. If a peer sets the goal, its figure is of the same run."""
    return [
        *(_no_more(f"apply → all pods at {nodes} nodes, p50", _all_pods(result, LOCKSTEP, nodes), _all_pods(result, JOBSET, nodes),
            "ms") for nodes in ["2", "16", "64"]),
        _at_least("burst of 200 jobs", at(result, "burst", LOCKSTEP, "200", "jobs_per_second"), 30, "jobs/s"),
        _at_most("writes to start a job of 2 nodes", at(result, "sizes", "2", LOCKSTEP, "writes", "total"), 9, ""),
        _no_more("own CPU per job at 64 nodes", _own_cpu(result, LOCKSTEP), _own_cpu(result, JOBSET), "ms", factor=1.5),
        _at_most("create → both processes run", at(result, "faults", "start", LOCKSTEP, "all_run", "median"), 1.5, "s"),
        _at_most("exit 1 → all run again, default backoff", at(result, "faults", "exit", LOCKSTEP, "all_run_again", "median"), 1.0, "s"),
        _no_more("memory with 1,000 jobs", at(result, "burst", LOCKSTEP, "1000", "memory_mb"),
            at(result, "burst", JOBSET, "1000", "memory_mb"), "MB"),
    ]  # fmt: skip


def _all_pods(result: Object, system: str, nodes: str) -> float | None:
    return at(result, "sizes", nodes, system, "all_pods_ms", "p50")


def _own_cpu(result: Object, system: str) -> float | None:
    return at(result, "sizes", "64", system, "cpu_ms", OWN)


def _at_most(name: str, measured: float | None, bound: float, unit: str) -> Goal:
    return Goal(name, _figure(measured, unit), f"≤ {_figure(bound, unit)}", None if measured is None else measured <= bound)


def _at_least(name: str, measured: float | None, bound: float, unit: str) -> Goal:
    return Goal(name, _figure(measured, unit), f"≥ {_figure(bound, unit)}", None if measured is None else measured >= bound)


def _no_more(name: str, measured: float | None, peer: float | None, unit: str, factor: float = 1.0) -> Goal:
    """Than JobSet, or so many times what it has."""
    times = "" if factor == 1 else f"{factor:g} × "
    if measured is None or peer is None:
        return Goal(name, _figure(measured, unit), f"≤ {times}JobSet's", None)
    return Goal(
        name,
        f"{_figure(measured, unit)}, {measured / peer:.2f} × JobSet's",
        f"≤ {times}JobSet's {_figure(peer, unit)}",
        measured <= factor * peer,
    )


def _figure(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:g} {unit}".rstrip()


def tables(result: Object) -> str:
    """Both tables as Markdown, with what was measured of them."""
    parts = [_sizes(result), _writes(result), _burst(result), _faults(result), _said(result)]
    return "\n\n".join("\n".join(part) for part in map(list, parts) if part)


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _head(*cells: str) -> Iterator[str]:
    yield _row(*cells)
    yield _row(*("---" for _ in cells))


def _triple(figures: Object) -> str:
    return " / ".join(f"{figures[name]:.0f}" for name in ("p50", "p95", "p99"))


def _sizes(result: Object) -> Iterator[str]:
    if not at(result, "sizes"):
        return
    yield from _head(
        "nodes",
        "",
        "apply → first pod, ms",
        "apply → all pods, ms",
        "own CPU a job, ms",
        "API server's, ms",
        "writes: own + controller manager's",
        "n",
    )
    for nodes, systems in result["sizes"].items():
        for system, found in systems.items():
            cpu, writes = found["cpu_ms"], found["writes"]
            yield _row(
                nodes, system, _triple(found["first_pod_ms"]), _triple(found["all_pods_ms"]), f"{cpu[OWN]:.0f}", f"{cpu['api_server']:.0f}",
                f"{writes['total']} = {writes[OWN]} + {writes[OTHERS]}", found["all_pods_ms"]["n"],
            )  # fmt: skip


def _writes(result: Object) -> Iterator[str]:
    systems = at(result, "sizes", "2")
    if not systems:
        return
    yield from _head("", "own writes to start a job of 2 nodes", "the controller manager's")
    for system, found in systems.items():
        kinds = found["writes"]["kinds"].items()
        yield _row(system, *(", ".join(f"{name.removeprefix(author + ' ')} {count:g}" for name,
            count in kinds if name.startswith(f"{author} ")) for author in (OWN, OTHERS)))  # fmt: skip


def _burst(result: Object) -> Iterator[str]:
    systems = at(result, "burst")
    if not systems:
        return
    counts = [count for count in next(iter(systems.values())) if count != "0"]
    measured = [(f"{count} jobs: seconds until all pods", "jobs/s", "own CPU a job, ms", "API server's, ms") for count in counts]
    yield from _head("", f"PSS with {' / '.join(['0', *counts])} jobs, MB", *(cell for cells in measured for cell in cells))
    for system, found in systems.items():
        memory = " / ".join(f"{found[count]['memory_mb']:.0f}" for count in ("0", *counts))
        columns = [
            (found[count]["seconds"], found[count]["jobs_per_second"], found[count]["cpu_ms"][OWN], found[count]["cpu_ms"]["api_server"])
            for count in counts
        ]
        yield _row(system, memory, *(cell for cells in columns for cell in cells))


def _faults(result: Object) -> Iterator[str]:
    faults = at(result, "faults")
    if not faults:
        return
    yield from _head("fault", "", "survivor stopped, s", "all run again, s", "n")
    for fault in ("exit", "delete", "hang"):
        for system, found in faults.get(fault, {}).items():
            alone = f"never; the rank alone {_spread(found['victim_again'])}" if found["victim_again"] else "never"
            again = _spread(found["all_run_again"]) if found["all_run_again"] else alone
            yield _row(
                FAULTS[fault], system, _spread(found["survivor_stopped"]) if found["survivor_stopped"] else "never", again, found["n"]
            )
    for system, found in faults.get("start", {}).items():
        yield _row("create → all processes run", system, "", _spread(found["all_run"]), found["all_run"]["n"])
    for system, found in faults.get("image", {}).items():
        yield _row(f"{WRONG_IMAGE}: said by the status", system, "", _spread(found["after"]) if found["after"] else "never", found["n"])


def _said(result: Object) -> Iterator[str]:
    """Messages of the first run of every fault; the result has all of them."""
    faults = at(result, "faults")
    if not faults:
        return
    yield from _head("fault", "", "longest of the conditions that came with it")
    for fault, title in (*FAULTS.items(), ("image", WRONG_IMAGE)):
        for system, found in faults.get(fault, {}).items():
            yield _row(title, system, max(found["said"], key=len, default="none").replace("|", "/")[:SAID_CHARACTERS])


def _spread(figures: Object) -> str:
    return f"{figures['median']:g} [{figures['min']:g}..{figures['max']:g}]"
