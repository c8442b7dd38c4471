"""Bounds of a job's status: each field as its CRD says, and all of it together. Pure.

What node 0 reports comes from a pod, whose image a user chose. The API server refuses a status as a whole for one field that is too long, out of
range or no time, and etcd one that is too large with its job: then nobody would hear of the job's end either.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from functools import cache, lru_cache
from typing import Any

from lockstep.api.generate.schema import Schema, structural_schema
from lockstep.api.objects import Object
from lockstep.api.status import TrainingJobStatus
from lockstep.plan.times import seconds_of

STATUS_BYTES_MAX = 256 << 10
"""Bytes of a job's whole status, as the API server stores it. etcd takes requests of 1.5 MiB, and the job is in the same one."""
_SHORTER = (2048, 1024, 512, 256)
"""Bytes to which every text is cut, one after the other, until the status fits. With the last one it does: lists are bounded, too."""
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII)
_INTEGER_MAX = 2**63 - 1
_LEFT_OUT = object()


def fitted(status: Object) -> Object:
    """The same status as the CRD takes it: texts and lists cut, what still breaks its schema left out, at most STATUS_BYTES_MAX in all."""
    fits: Object = _fitted(status, _schema(), is_whole=True)
    for most in _SHORTER:
        if stored_bytes(fits) <= STATUS_BYTES_MAX:
            break
        fits = _shortened(fits, most)
    return fits


def readable(status: Object) -> Object:
    """A stored status without what isn't as its schema says, and without what requires that: whoever wrote it, it can be computed with.

    The API server takes times that nothing can compute with. What is absent, in a status of another version, is nobody's fault.
    """
    fits: Object = _fitted(status, _schema(), is_whole=False)
    return fits


def stored_bytes(value: Any) -> int:
    """Bytes of its JSON, as the largest of the two writers has it: Python's escapes what isn't ASCII, the API server's three characters of HTML."""
    text = json.dumps(value, separators=(",", ":"))
    return len(text) + 5 * sum(text.count(character) for character in "<>&")


@cache
def _schema() -> Schema:
    return structural_schema(TrainingJobStatus, described=False)


def _fitted(value: Any, schema: Schema, *, is_whole: bool) -> Any:
    """`is_whole`: what lacks a required field is left out, too, and not only what has a wrong one."""
    kind = schema["type"]
    if kind == "string" and isinstance(value, str):
        return _fitted_text(value, schema)
    if kind == "object" and isinstance(value, dict):
        return _fitted_object(value, schema, is_whole=is_whole)
    if kind == "array" and isinstance(value, list):
        items = [_fitted(item, schema["items"], is_whole=is_whole) for item in value[: schema["maxItems"]]]
        return [item for item in items if item is not _LEFT_OUT]
    if kind == "boolean":
        return value if isinstance(value, bool) else _LEFT_OUT
    is_number = kind == "integer" and isinstance(value, int) and not isinstance(value, bool)
    least = schema.get("minimum", -_INTEGER_MAX)
    return value if is_number and least <= value <= schema.get("maximum", _INTEGER_MAX) else _LEFT_OUT


def _fitted_object(value: Object, schema: Schema, *, is_whole: bool) -> Any:
    fields = schema["properties"]
    fits = {}
    for name, item in value.items():
        fitting = _LEFT_OUT if item is None or name not in fields else _fitted(item, fields[name], is_whole=is_whole)
        if fitting is not _LEFT_OUT:
            fits[name] = fitting
    return fits if all(name in fits for name in schema.get("required", ()) if is_whole or name in value) else _LEFT_OUT


def _fitted_text(text: str, schema: Schema) -> Any:
    if schema.get("format") == "date-time":
        return text if len(text) <= schema["maxLength"] and _is_time(text) else _LEFT_OUT
    if "enum" in schema:
        return text if text in schema["enum"] else _LEFT_OUT
    cut = text[: schema["maxLength"]]
    return cut if "pattern" not in schema or re.search(schema["pattern"], cut) else _LEFT_OUT


@lru_cache(1024)
def _is_time(text: str) -> bool:
    """Return True if it can be computed with. The API server takes more: the year 0, and an offset of 99 hours."""
    try:
        return bool(_TIME.fullmatch(text)) and seconds_of(text) is not None
    except ValueError:
        return False


def _shortened(value: Any, most: int) -> Any:
    """Every text in it cut to so many bytes."""
    if isinstance(value, dict):
        return {key: _shortened(item, most) for key, item in value.items()}
    if isinstance(value, list):
        return [_shortened(item, most) for item in value]
    if not isinstance(value, str) or stored_bytes(value) <= most + 2:
        return value
    return value[: bisect_right(range(len(value) + 1), most + 2, key=lambda length: stored_bytes(value[:length])) - 1]
