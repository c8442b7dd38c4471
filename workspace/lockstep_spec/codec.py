"""JSON to frozen dataclasses and back, by their type hints. A wrong type, a value out of bounds or a missing key is an error that says
where.

Field names are snake_case in Python and camelCase in JSON. Known kinds of field: str, int, float, bool, enumerations, dataclasses,
`X | None`, `tuple[X, ...]`, `dict[str, X]` or `Mapping[str, X]`, a NamedTuple (a list of its fields, without their names), and `Any` (taken
as it is); each may have bounds, as `Annotated[X, Must(...)]`.

What another version of Lockstep may have written is read by `from_json`: a gang that runs outlives upgrades and rollbacks of the operator,
and a volume outlives both. What people decide is read by `settings_from_json`: a setting that is silently ignored costs a whole run.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from lockstep_spec.choices import Choice

T = TypeVar("T")

_PLAIN: dict[type, str] = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_CONTAINERS: dict[Any, type] = {tuple: list, dict: dict, Mapping: dict}
SHOWN_CHARACTERS = 60
WORD_CHARACTERS = 64
"""Longest value of a `Choice` that is kept without being known."""


class ContractError(ValueError):
    """Raised for JSON that is not what its reader's types say. The message is one sentence: where, what it is, what is valid."""


@dataclasses.dataclass(frozen=True)
class Must:
    """Bounds of a field: the check of a value that has the field's type already, and the words for both in errors."""

    valid: str
    holds: Callable[[Any], bool]


@dataclasses.dataclass(frozen=True)
class Quoted(Must):
    """Bounds of a float that JSON has as text ("2e-4"), since the API has no floats. It is finite."""


def at_least(minimum: int) -> Must:
    """Bounds of a whole number."""
    return Must(f"a whole number ≥ {minimum}", lambda number: bool(number >= minimum))


def no_longer(most: int) -> Must:
    """Bounds of a text, a list or an object."""
    return Must(f"no longer than {most}", lambda value: len(value) <= most)


FINITE = Must("a number", math.isfinite)


def camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


def to_json(value: Any) -> Any:
    """`value` as plain dicts, lists, text and numbers, keys in camelCase. None stays, as null."""
    kind = type(value)
    if value is None or kind in _PLAIN:
        return value
    if dataclasses.is_dataclass(kind):
        return {key: to_json(getattr(value, field.name)) for key, field in _fields(kind).items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return value


def from_json(kind: type[T], value: object, where: str) -> T:
    """`value` (parsed JSON) as the dataclass `kind`. Unknown keys are a newer writer's, and ignored. Unknown values of a `Choice` are kept
    (`Choice.read`).

    `where` opens every error, for example `run.json`. Raises ContractError.
    """
    decoded: T = _decode(kind, value, where, strict=False)
    return decoded


def settings_from_json(kind: type[T], value: object, where: str) -> T:
    """`value` (parsed JSON) as the dataclass `kind`, in which an unknown key is an error that names the valid ones. Raises
    ContractError.
    """
    decoded: T = _decode(kind, value, where, strict=True)
    return decoded


def readable_from_json(kind: type[T], value: object, where: str) -> tuple[T, dict[str, str]]:
    """Return what `from_json` does, without the optional fields of `kind` that can't be read; and the error of each of these, by its key.

    Raises ContractError for the required ones.
    """
    try:
        return from_json(kind, value, where), {}
    except ContractError:
        present: dict[str, Any] = dict(_expect(dict, value, "an object", where))
    fields: dict[str, _Field] = _fields(cast(Any, kind))
    errors: dict[str, str] = {}
    for key in [key for key, field in fields.items() if key in present and not field.required]:
        try:
            _decode(fields[key].kind, present[key], f"{where}.{key}", strict=False)
        except ContractError as error:
            del present[key]
            errors[key] = str(error)
    return from_json(kind, present, where), errors


def refuse(where: str, value: object, valid: str) -> ContractError:
    """The error for a `value` that is not `valid`."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}…"
    return ContractError(f"{where} is {shown}, but must be {valid}")


def _decode(kind: Any, value: Any, where: str, *, strict: bool) -> Any:  # noqa: PLR0911 (one return a kind of field)
    if kind is Any or (type(value) is kind and kind in _PLAIN):  # most are, and a big gang's coordinator reads thousands a second
        return value
    origin = _origin(kind)
    if origin is Annotated:
        inner, must = get_args(kind)
        return _decode_bounded(inner, must, value, where, strict=strict)
    if origin in (Union, types.UnionType):
        return None if value is None else _decode(_without_none(kind), value, where, strict=strict)
    if origin is tuple:
        return _decode_items(_item(kind), _expect(list, value, "a list", where), where, strict=strict)
    if origin in (dict, Mapping):
        pairs = _expect(dict, value, "an object", where).items()
        return {key: _decode(get_args(kind)[1], item, f"{where}.{key}", strict=strict) for key, item in pairs}
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, _expect(dict, value, "an object", where), where, strict=strict)
    if issubclass(kind, Enum):
        return _decode_enum(kind, value, where, strict=strict)
    if issubclass(kind, tuple):
        return _decode_row(kind, value, where, strict=strict)
    if _is_whole(kind, value):
        return float(value)
    return _expect(kind, value, _PLAIN[kind], where)


def _decode_bounded(kind: Any, must: Must, value: Any, where: str, *, strict: bool) -> Any:
    if isinstance(must, Quoted):
        decoded = _quoted_number(value)
    elif type(value) is _CONTAINERS.get(_origin(kind), kind) or _is_whole(kind, value):
        decoded = _decode(kind, value, where, strict=strict)
    else:
        decoded = None
    if decoded is None or not must.holds(decoded):
        raise refuse(where, value, must.valid)
    return decoded


def _is_whole(kind: Any, value: Any) -> bool:
    """Return True for a float that JSON has without a point, and that a float can hold."""
    return kind is float and type(value) is int and abs(value) < 1 << 1023


def _quoted_number(text: Any) -> float | None:
    try:
        number = float(text) if isinstance(text, str) else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


@cache
def _origin(kind: Any) -> Any:
    return get_origin(kind)


@cache
def _without_none(kind: Any) -> Any:
    return next(arg for arg in get_args(kind) if arg is not type(None))


def _expect(kind: type, value: Any, valid: str, where: str) -> Any:
    if type(value) is not kind:  # exactly: True is an int to isinstance
        raise refuse(where, value, valid)
    return value


def _decode_items(field: _Field, items: list[Any], where: str, *, strict: bool) -> tuple[Any, ...]:
    if all(field.takes(item) for item in items):
        return tuple(items)
    return tuple(_decode(field.kind, item, f"{where}[{i}]", strict=strict) for i, item in enumerate(items))


def _decode_row(kind: Any, value: Any, where: str, *, strict: bool) -> Any:
    columns = _columns(kind)
    if type(value) is not list or len(value) != len(columns):
        raise refuse(where, value, f"a list of {', '.join(column.name for column in columns)}")
    items = zip(columns, value, strict=True)
    return kind(
        *(item if column.takes(item) else _decode(column.kind, item, f"{where}.{column.name}", strict=strict) for column, item in items)
    )


def _decode_enum(kind: type[Enum], value: Any, where: str, *, strict: bool) -> Enum:
    for member in kind:
        if member.value == value:
            return member
    if not strict and issubclass(kind, Choice) and isinstance(value, str) and 0 < len(value) <= WORD_CHARACTERS:
        return kind.read(value)
    raise refuse(where, value, f"one of {', '.join(str(member.value) for member in kind)}")


class _Field(NamedTuple):
    name: str
    kind: Any
    required: bool
    plain: frozenset[type]
    """Classes of values that are taken as they are, if they hold."""
    holds: Callable[[Any], bool] | None

    def takes(self, item: Any) -> bool:
        return type(item) in self.plain and (self.holds is None or item is None or self.holds(item))


@cache
def _item(kind: Any) -> _Field:
    """Items of a `tuple[X, ...]`."""
    inner, _ = get_args(kind)
    return _Field("", inner, True, *_taken_as_they_are(inner))


@cache
def _columns(kind: Any) -> tuple[_Field, ...]:
    """Fields of a NamedTuple."""
    return tuple(_Field(name, hint, True, *_taken_as_they_are(hint)) for name, hint in get_type_hints(kind, include_extras=True).items())


@cache
def _fields(kind: Any) -> dict[str, _Field]:
    """JSON key → field."""
    hints = get_type_hints(kind, include_extras=True)
    absent = (dataclasses.MISSING, dataclasses.MISSING)
    return {
        camel(f.name): _Field(f.name, hints[f.name], (f.default, f.default_factory) == absent, *_taken_as_they_are(hints[f.name]))
        for f in dataclasses.fields(kind)
    }


def _taken_as_they_are(kind: Any) -> tuple[frozenset[type], Callable[[Any], bool] | None]:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        plain, holds = _taken_as_they_are(_without_none(kind))
        return plain | {type(None)}, holds
    if origin is Annotated:
        inner, must = get_args(kind)
        return (frozenset(), None) if isinstance(must, Quoted) else (_taken_as_they_are(inner)[0], must.holds)
    return frozenset({kind}) if kind in _PLAIN else frozenset(), None


def _decode_dataclass(kind: Any, value: dict[str, Any], where: str, *, strict: bool) -> Any:
    fields = _fields(kind)
    if strict:
        for key in value:
            if key not in fields:
                raise ContractError(f"{where}.{key} is not a setting; valid here: {', '.join(fields)}")
    decoded: dict[str, Any] = {}
    for key, field in fields.items():
        if key in value:
            item = value[key]
            decoded[field.name] = item if field.takes(item) else _decode(field.kind, item, f"{where}.{key}", strict=strict)
        elif field.required:
            raise ContractError(f"{where}.{key} is missing")
    return kind(**decoded)
