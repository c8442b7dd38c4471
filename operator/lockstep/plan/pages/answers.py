"""Answers of pods about themselves, reduced to what was asked for, with the types that it must have and within limits (pure).

Whoever made a job's image, or runs code in it, decides what `runfolder.py` answers there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, TypeVar

from lockstep.api.objects import Object
from lockstep_spec.words import printable_line

T = TypeVar("T")
POINTS_MAX = 20_000
NICS_MAX, GPUS_MAX, RANKS_MAX, WORDS_MAX = 64, 64, 4096, 200


def read_node(answer: Mapping[str, Any]) -> Object:
    """`runfolder.Watch.answer`, without what is none of it."""
    facts: Object = {
        "gigabits": _table(answer.get("gigabits"), _rates, NICS_MAX),
        "cpu": amounts(answer.get("cpu"), ("cores", "limitCores")),
        "memory": counts(answer.get("memory"), ("bytes", "limitBytes")),
        "gpus": [gpu for gpu in map(read_gpu, items(answer.get("gpus"), GPUS_MAX)) if "index" in gpu],
        "rankLoads": [load for load in map(_rank_load, items(answer.get("rankLoads"), RANKS_MAX)) if "rank" in load],
        "gpuProblem": word(answer.get("gpuProblem")),
        "curve": _records(answer.get("curve")),
    }
    facts = {key: value for key, value in facts.items() if value}
    if "bytes" not in facts.get("memory", {}):
        facts.pop("memory", None)
    if isinstance(answer.get("ranks"), list):
        facts["ranks"] = [rank for rank in items(answer["ranks"], RANKS_MAX) if is_count(rank)]
    return facts


def read_gpu(value: object) -> Object:
    """GPU of `rankload.gpus`; without `index` if it is none."""
    words = {name: text for name in ("uuid", "name") if (text := word(mapping(value).get(name)))}
    return {**counts(value, ("index", "bytes", "limitBytes", "percentage", "celsius", "watts", "limitWatts")), **words}


def _rank_load(value: object) -> Object:
    return {**counts(value, ("rank", "bytes", "gpu")), **amounts(value, ("cores",))}


def amounts(value: object, names: tuple[str, ...]) -> Object:
    """Numbers of these names that are 0 or more."""
    numbers = {name: _number(item) for name, item in mapping(value).items() if name in names}
    return {name: number for name, number in numbers.items() if number is not None and number >= 0}


def word(value: object) -> str:
    """Text of one line; '' for anything else."""
    return printable_line(value[:WORDS_MAX]) if isinstance(value, str) else ""


def read_steps(answer: Mapping[str, Any]) -> dict[str, Object]:
    """Return the steps of `runfolder.summary`, without what is none of it."""
    return _records(answer.get("steps"))


def _records(value: object) -> dict[str, Object]:
    """step → name → number."""
    steps = {step: record for step, record in mapping(value).items() if step.isdecimal() and len(step) < 20}
    return _table(steps, lambda record: _table(record, _number, NICS_MAX), POINTS_MAX)


def _table(value: object, read: Callable[[object], T | None], most: int) -> dict[str, T]:
    """The first entries that `read` takes."""
    entries = ((str(key)[:WORDS_MAX], read(item)) for key, item in list(mapping(value).items())[:most])
    return {key: item for key, item in entries if item is not None}


def _rates(value: object) -> list[float] | None:
    rates = [_number(item) for item in items(value, 2)]
    return [rate for rate in rates if rate is not None] if len(rates) == 2 and None not in rates else None


def counts(value: object, names: tuple[str, ...]) -> Object:
    """Whole numbers of these names that are 0 or more."""
    return {name: item for name, item in mapping(value).items() if name in names and is_count(item)}


def _number(value: object) -> float | None:
    """None for what isn't one, and for those that no picture can show."""
    try:
        return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None
    except OverflowError:
        return None


def is_count(value: object) -> TypeGuard[int]:
    """True if it is a whole number that something can have been counted to."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def mapping(value: object) -> dict[str, Any]:
    """The value if it is an object, else {}."""
    return value if isinstance(value, dict) else {}


def items(value: object, most: int) -> list[Any]:
    """The first of a list's; of anything else, none."""
    return value[:most] if isinstance(value, list) else []
