"""Readers of JSON values that refuse whatever isn't exactly what they promise, naming the field's path."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from enum import Enum
from typing import Any, TypeVar

from lockstep_train.base.errors import ConfigError

T = TypeVar("T")


def camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)


def refuse(path: str, value: object, valid: str) -> ConfigError:
    return ConfigError(f"{path} is {json.dumps(value)}, but must be {valid}")


def integer(path: str, value: object, minimum: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise refuse(path, value, f"a whole number ≥ {minimum}")
    return value


def decimal(path: str, value: object) -> float:
    """A decimal number written as a string, finite and ≥ 0."""
    try:
        number = float(value) if isinstance(value, str) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise refuse(path, value, 'a decimal number ≥ 0 in quotes, such as "2e-4"')
    return number


def string(path: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise refuse(path, value, "a non-empty string")
    return value


def boolean(path: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise refuse(path, value, "true or false")
    return value


def mapping(path: str, value: object) -> dict[str, Any]:
    """Any JSON object, as it is."""
    if not isinstance(value, dict):
        raise refuse(path, value, "an object")
    return value


def items(reader: Callable[[str, object], T]) -> Callable[[str, object], tuple[T, ...]]:
    """A list, possibly empty, each item read by `reader`."""

    def read(path: str, value: object) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise refuse(path, value, "a list")
        return tuple(reader(f"{path}[{index}]", item) for index, item in enumerate(value))

    return read


def strings(path: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise refuse(path, value, "a non-empty list of strings")
    return tuple(string(f"{path}[{index}]", item) for index, item in enumerate(value))


def enumerated(kind: type[Enum]) -> Callable[[str, object], Enum]:
    def read(path: str, value: object) -> Enum:
        for member in kind:
            if member.value == value:
                return member
        raise refuse(path, value, "one of " + ", ".join(str(member.value) for member in kind))

    return read


def optional(reader: Callable[[str, object], Any]) -> Callable[[str, object], Any]:
    return lambda path, value: None if value is None else reader(path, value)


def section(kind: type[T], readers: Mapping[str, Callable[[str, object], Any]]) -> Callable[[str, object], T]:
    """A reader of one JSON object into `kind`; `readers` has one entry a field."""

    def read(path: str, value: object) -> T:
        if not isinstance(value, dict):
            raise refuse(path, value, "an object")
        known = {camel(field.name): field for field in fields(kind)}  # type: ignore[arg-type]
        for key in value:
            if key not in known:
                raise ConfigError(f"{path}.{key} is not a setting; valid here: {', '.join(known)}")
        arguments: dict[str, Any] = {}
        for key, field in known.items():
            if key in value:
                arguments[field.name] = readers[field.name](f"{path}.{key}", value[key])
            elif field.default is MISSING and field.default_factory is MISSING:
                raise ConfigError(f"{path}.{key} is missing; a {kind.__name__} needs it")
        return kind(**arguments)

    return read


def positive(path: str, value: object) -> int:
    return integer(path, value, minimum=1)


def share(path: str, value: object) -> float:
    number = decimal(path, value)
    if not 0 < number < 1:
        raise refuse(path, value, 'a share between 0 and 1 in quotes, such as "0.05"')
    return number


def probability(path: str, value: object) -> float:
    return _below_one(path, value, "probability")


def fraction(path: str, value: object) -> float:
    return _below_one(path, value, "number")


def _below_one(path: str, value: object, kind: str) -> float:
    number = decimal(path, value)
    if number >= 1:
        raise refuse(path, value, f'a {kind} ≥ 0 and < 1 in quotes, such as "0.05"')
    return number
