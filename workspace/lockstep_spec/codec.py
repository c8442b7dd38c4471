"""JSON to frozen dataclasses and back: a wrong type or a missing key is an error that says where; an unknown key is a newer writer's, and left alone.

Who writes and who reads may be of different age: a gang that runs outlives upgrades and rollbacks of the operator, and a volume outlives both.

Field names are snake_case in Python and camelCase in JSON. Known kinds of field: str, int, bool, enumerations, dataclasses,
`X | None`, `tuple[X, ...]`, `dict[str, X]` and `Any` (taken as it is).
"""

from __future__ import annotations

import dataclasses
import types
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_PLAIN = {str: "text", int: "a whole number", bool: "true or false"}


class ContractError(ValueError):
    """What was read is not what the contract says. The message is one sentence: where, what it is, what is valid."""


def camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


def to_json(value: Any) -> Any:
    """`value` as plain dicts, lists, text and numbers, keys in camelCase. None stays, as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {camel(f.name): to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return value


def from_json(kind: type[T], value: object, where: str) -> T:
    """`value` (parsed JSON) as the dataclass `kind`; `where` opens every error, for example `run.json`.

    Raises ContractError.
    """
    decoded: T = _decode(kind, value, where)
    return decoded


def _decode(kind: Any, value: Any, where: str) -> Any:  # noqa: PLR0911 (one return a kind of field)
    if kind is Any or (type(value) is kind and kind in _PLAIN):  # most are, and a big gang's coordinator reads thousands a second
        return value
    origin = _origin(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else _decode(_without_none(kind), value, where)
    if origin is tuple:
        return tuple(_decode(get_args(kind)[0], item, f"{where}[{i}]") for i, item in enumerate(_expect(list, value, "a list", where)))
    if origin is dict:
        items = _expect(dict, value, "an object", where).items()
        return {key: _decode(get_args(kind)[1], item, f"{where}.{key}") for key, item in items}
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, _expect(dict, value, "an object", where), where)
    if issubclass(kind, Enum):
        return _decode_enum(kind, value, where)
    return _expect(kind, value, _PLAIN[kind], where)


@cache
def _origin(kind: Any) -> Any:
    return get_origin(kind)


@cache
def _without_none(kind: Any) -> Any:
    return next(arg for arg in get_args(kind) if arg is not type(None))


def _expect(kind: type, value: Any, called: str, where: str) -> Any:
    if type(value) is not kind:  # exactly: True is an int to isinstance
        raise ContractError(f"{where} is {_shown(value)}, must be {called}")
    return value


def _decode_enum(kind: type[Enum], value: Any, where: str) -> Enum:
    for member in kind:
        if member.value == value:
            return member
    raise ContractError(f"{where} is {_shown(value)}, must be one of {', '.join(str(m.value) for m in kind)}")


@cache
def _fields(kind: Any) -> dict[str, tuple[str, Any, frozenset[type]]]:
    """JSON key → (field name, its type, classes of values that are taken as they are)."""
    hints = get_type_hints(kind)
    return {camel(f.name): (f.name, hints[f.name], _taken_as_they_are(hints[f.name])) for f in dataclasses.fields(kind)}


@cache
def _required(kind: Any) -> tuple[str, ...]:
    """JSON keys that may not be left out."""
    optional = (dataclasses.MISSING, dataclasses.MISSING)
    return tuple(camel(f.name) for f in dataclasses.fields(kind) if (f.default, f.default_factory) == optional)


def _taken_as_they_are(kind: Any) -> frozenset[type]:
    if get_origin(kind) in (Union, types.UnionType):
        return _taken_as_they_are(_without_none(kind)) | {type(None)}
    return frozenset({kind}) if kind in _PLAIN else frozenset()


def _decode_dataclass(kind: Any, value: dict[str, Any], where: str) -> Any:
    for key in _required(kind):
        if key not in value:
            raise ContractError(f"{where}.{key} is missing")
    decoded: dict[str, Any] = {}
    for key, (name, field_kind, plain) in _fields(kind).items():
        if key in value:
            item = value[key]
            decoded[name] = item if type(item) in plain else _decode(field_kind, item, f"{where}.{key}")
    return kind(**decoded)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
