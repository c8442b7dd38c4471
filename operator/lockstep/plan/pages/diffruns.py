"""Two runs beside each other: what they were told, and what came of it (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.api.objects import Object
from lockstep.plan.pages.redact import Redactor
from lockstep.plan.pages.table import aligned

ROWS = 10
"""Rows of a loss curve for a person; JSON has all."""
LONGEST = 40
_SETTINGS = ("nodes", "ranksPerNode", "nodeRanks", "gpusPerNode", "storage")
_SCRIPT = ("command", "workingDirectory")


@dataclass(frozen=True)
class Side:
    """One of the two runs. `settings` and `spec` are flat; `steps` and `evaluations`: the loss by step."""

    name: str
    settings: Object
    spec: Object | None = None
    """Spec of the job without what `settings` has; None for a folder, which holds no spec."""
    results: Object = field(default_factory=dict)
    steps: Mapping[int, float] = field(default_factory=dict)
    evaluations: Mapping[int, float] = field(default_factory=dict)


def settings_of(run: Object) -> Object:
    """Settings of a run.json that make one run differ from another: not its name, addresses and files."""
    training = run.get("training")
    chosen: Object = {key: run[key] for key in (*_SETTINGS, *(() if training else _SCRIPT)) if run.get(key) not in (None, [])}
    return flat(chosen | ({"training": training} if training else {}))


def spec_of(spec: Object) -> Object:
    """The rest of a job's spec: image, variables, volumes, restarts."""
    return flat({key: value for key, value in spec.items() if key not in ("training", "script", "suspend", *_SETTINGS)})


def flat(value: Object) -> Object:
    """path → value, without secrets as far as they can be told: nobody should have to look for them in a comparison."""
    return dict(_leaves(Redactor().object(value), ""))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{path}[{number}]")
    elif value is not None:
        yield path, value


def results_of(summary: Object, status: Object) -> Object:
    """Figures of a run by name, from its folder and its status, as far as there are any. `goodputPercentage` is of either."""
    steps = curve(summary.get("steps", {}), "loss")
    evaluations = curve(summary.get("evaluations", {}), "evalLoss")
    medians, end = summary.get("medians", {}), summary.get("end", {})
    result = status.get("result") or end.get("result") or {}
    figures = {
        "state": next(
            (c["type"] for c in status.get("conditions", []) if c["type"] in ("Complete", "Failed") and c["status"] == "True"),
            end.get("state"),
        ),
        "steps": max(steps, default=(status.get("trainer") or {}).get("step")),
        "lastLoss": steps[max(steps)] if steps else None,
        "leastLoss": min(steps.values(), default=None),
        "evalLossBefore": result.get("evalLossBefore"),
        "evalLossAfter": result.get("evalLossAfter") or (evaluations[max(evaluations)] if evaluations else None),
        **{name: medians.get(name) for name in ("tokensPerSecond", "stepSeconds", "mfu")},
        "goodputPercentage": (status.get("goodput") or {}).get("percentage"),
        "restarts": status.get("restarts"),
    }
    return {name: value for name, value in figures.items() if value is not None}


def curve(records: Mapping[str, Object], name: str) -> dict[int, float]:
    return {int(step): float(values[name]) for step, values in records.items() if values.get(name) is not None}


def compare(one: Side, other: Side) -> Object:
    """Differences of two runs' settings, their figures, and their losses at the steps that both have."""
    both = one.spec is not None and other.spec is not None
    first, second = ({**side.settings, **((side.spec or {}) if both else {})} for side in (one, other))
    fields = [field for field in dict.fromkeys([*first, *second]) if first.get(field) != second.get(field)]
    names = dict.fromkeys([*one.results, *other.results])
    return {
        "runs": [one.name, other.name],
        "configuration": [{"field": field, "values": [first.get(field), second.get(field)]} for field in fields],
        "results": [{"name": name, "values": [one.results.get(name), other.results.get(name)]} for name in names],
        "loss": _both(one.steps, other.steps),
        "evalLoss": _both(one.evaluations, other.evaluations),
    }


def _both(one: Mapping[int, float], other: Mapping[int, float]) -> list[Object]:
    return [{"step": step, "values": [one[step], other[step]]} for step in sorted(one.keys() & other.keys())]


def comparison_page(comparison: Object) -> Iterator[str]:
    names = tuple(comparison["runs"])
    settings = [(row["field"], *map(_shown, row["values"]), "") for row in comparison["configuration"]]
    if not settings:
        yield "the same configuration: " + " and ".join(names)
    results = [(row["name"], *map(_shown, row["values"]), _change(*row["values"])) for row in comparison["results"]]
    curves = [
        (f"{name} at step {row['step']}", *map(_shown, row["values"]), _change(*row["values"]))
        for name in ("loss", "evalLoss")
        for row in _some(comparison[name])
    ]
    sections = [("CONFIGURATION", settings), ("RESULT", results), ("AT THE SAME STEP", curves)]
    blocks = [((title, *names, "" if rows is settings else "CHANGE"), *rows, ("",) * 4) for title, rows in sections if rows]
    yield from aligned([line for block in blocks for line in block][:-1])
    if not curves and results:
        yield "no step was measured in both runs"


def _some(rows: Sequence[Object]) -> list[Object]:
    """Evenly chosen, with the first and the last."""
    if len(rows) <= ROWS:
        return list(rows)
    return [rows[round(index * (len(rows) - 1) / (ROWS - 1))] for index in range(ROWS)]


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    number = _number(value)
    text = f"{number:.5g}" if isinstance(value, float) and number is not None else str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _change(one: Any, other: Any) -> str:
    before, after = _number(one), _number(other)
    if before is None or after is None or before == after:
        return ""
    return f"{(after - before) / abs(before) * 100:+.1f}%" if before else f"{after - before:+.4g}"


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
