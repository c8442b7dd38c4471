"""YAML templates to plain objects. Templates hold structure only: every value goes in through `tojson`.

Neither Jinja nor YAML ever sees a value: a template is rendered and parsed once, with a mark where each value goes, and `fill` replaces the
marks. So no text can become structure, what YAML can't hold (DEL, lone surrogates) passes unchanged, and a job costs no rendering and no
parsing. A `for` is rendered once too, with marks of its item, and `fill` repeats that for each item of the list.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from lockstep.api import names
from lockstep.api.files.yamltext import load_yaml

MARK = "\ue000value "
"""A character of private use: no template has it."""
Scope = dict[str, Any]
"""Meaning of names: "" has the values that `fill` was called with, "agent.env.*" the item of a loop over the field `env` of `agent`."""


class _Mark(StrictUndefined):
    """A value that a template uses: a name, a field of one, or the item of a loop. Only `tojson` and `for` can do anything with it."""

    def __getattr__(self, field: str) -> Any:
        return super().__getattr__(field) if field.startswith("_") else _Mark(name=f"{self._undefined_name}.{field}")

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield _Mark(name=f"{self._undefined_name}.*")


@dataclass(frozen=True)
class _Place:
    """Place of a value: the one that `fields` lead to in `loop`'s item."""

    loop: str
    fields: tuple[str, ...]


@dataclass(frozen=True)
class _Repeated:
    """Content of a `for`: `item`, for each item of the list at `items`."""

    loop: str
    items: _Place
    item: Any
    shown: frozenset[str]
    """The item's fields that stand there; empty where the whole item does."""


@cache
def _structure(template: str) -> Any:
    """Return `templates/<template>.yaml.j2`, parsed, with a `_Place` for each value and a `_Repeated` for each `for`."""
    return _parsed(load_yaml(_environment().get_template(f"{template}.yaml.j2").render()), "")


@cache
def _environment() -> Environment:
    loader = PackageLoader("lockstep.plan.render")
    environment = Environment(loader=loader, undefined=_Mark, autoescape=False, trim_blocks=True, lstrip_blocks=True)  # noqa: S701 (not HTML)
    environment.filters["tojson"] = lambda value: json.dumps(value, default=lambda mark: MARK + mark._undefined_name)
    environment.globals = {"names": names}  # whose constants are no values of a job; Jinja's own would hide names such as `namespace`
    return environment


def _parsed(structure: Any, loop: str) -> Any:
    if isinstance(structure, dict):
        return {key: _parsed(item, loop) for key, item in structure.items()}
    if isinstance(structure, list):
        return [_parsed_item(item, loop) for item in structure]
    return next((_place(name) for name in _marks(structure)), structure)


def _parsed_item(item: Any, loop: str) -> Any:
    """An item of a list, which a `for` inside of `loop` may repeat: then it shows a value of the loop's item, outside of lists of its
    own.
    """
    inner = f"{loop}." if loop else ""
    repeated = [name for name in _marks(item, lists=False) if name.startswith(inner) and "*" in name.removeprefix(inner)]
    if not repeated:
        return _parsed(item, loop)
    items = repeated[0][: repeated[0].index(".*", len(inner))]
    places = [_place(name) for name in repeated if name.startswith(f"{items}.*")]
    shown = frozenset(place.fields[0] for place in places if place.fields)
    return _Repeated(f"{items}.*", _place(items), _parsed(item, f"{items}.*"), shown)


def _place(name: str) -> _Place:
    loop, star, fields = name.rpartition("*")
    return _Place(loop + star, tuple(filter(None, fields.split("."))))


def _marks(structure: Any, *, lists: bool = True) -> Iterator[str]:
    """Names of all values in a structure, with or without those in lists."""
    if isinstance(structure, str) and structure.startswith(MARK):
        yield structure.removeprefix(MARK)
    children = structure.values() if isinstance(structure, dict) else structure if isinstance(structure, list) and lists else ()
    for child in children:
        yield from _marks(child, lists=lists)


def fill(template: str, **values: object) -> dict[str, Any]:
    """Return the object that `templates/<template>.yaml.j2` makes of `values`; fields that are empty, None or not there are left out.

    Raises KeyError for a value that the template needs and that isn't given, and for a field of a repeated item that the template doesn't
    show.
    """
    plain = {name: _plain(value) for name, value in values.items()}
    result: dict[str, Any] = _without_empty(_filled(_structure(template), {"": plain}))
    return result


def _filled(structure: Any, scope: Scope) -> Any:
    """A copy with every value in its place."""
    if isinstance(structure, dict):
        return {key: _filled(item, scope) for key, item in structure.items()}
    if isinstance(structure, list):
        return [filled for item in structure for filled in (_each(item, scope) if isinstance(item, _Repeated) else (_filled(item, scope),))]
    return _value(structure, scope) if isinstance(structure, _Place) else structure


def _each(repeated: _Repeated, scope: Scope) -> Iterator[Any]:
    for item in _value(repeated.items, scope) or ():
        if repeated.shown and (unknown := item.keys() - repeated.shown):
            raise KeyError(f"the template shows no {', '.join(sorted(unknown))} of {repeated.loop}")
        yield _filled(repeated.item, {**scope, repeated.loop: item})


def _value(place: _Place, scope: Scope) -> Any:
    value = scope[place.loop]
    for index, field in enumerate(place.fields):
        value = value[field] if not (index or place.loop) else None if value is None else value.get(field)
    return value


def _plain(value: object) -> Any:
    """The value as JSON has it, and nobody else's."""
    return value if type(value) in (str, int, bool, type(None)) else json.loads(json.dumps(value))


def _without_empty(value: Any) -> Any:
    """The API server drops empty fields, so an object that keeps them would differ from what it stores.

    Kept: the empty object that chooses a variant, such as `emptyDir: {}`, and empty strings, which are values.
    """
    if isinstance(value, dict):
        filled = {key: _without_empty(item) for key, item in value.items() if item is not None}
        return {key: item for key, item in filled.items() if item != [] and (item != {} or key == "emptyDir")}
    if isinstance(value, list):
        return [_without_empty(item) for item in value]
    return value
