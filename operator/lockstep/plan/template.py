"""YAML templates to plain objects. Templates hold structure only: every value goes in through `tojson`.

YAML never sees a value: `tojson` puts a mark where it goes, and it replaces the mark after parsing. So no text can become structure, what YAML
can't hold (DEL, lone surrogates) passes unchanged, and the parsed structure is the same for all jobs and kept: parsing took most of a reconcile.
"""

from __future__ import annotations

import json
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from lockstep.api.yamltext import load_yaml

MARK = "\ue000value "
"""A character of private use: no template has it."""
_values: ContextVar[list[object]] = ContextVar("values")


def _marked(value: object) -> str:
    values = _values.get()
    values.append(value)
    return f'"{MARK}{len(values) - 1}"'


@cache
def _environment() -> Environment:
    environment = Environment(loader=PackageLoader("lockstep.plan"), undefined=StrictUndefined, autoescape=False)  # noqa: S701 (not HTML)
    environment.filters["tojson"] = _marked
    return environment


@lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    return load_yaml(text)


def fill(template: str, **values: object) -> dict[str, Any]:
    """The object that `templates/<template>.yaml.j2` makes of `values`; fields that are empty or None are left out."""
    token = _values.set([])
    try:
        text = _environment().get_template(f"{template}.yaml.j2").render(values)
        result: dict[str, Any] = _without_empty(_with_values(_parsed(text), _values.get()))
    finally:
        _values.reset(token)
    return result


def _with_values(structure: Any, values: list[object]) -> Any:
    """A copy with every mark replaced, also where it is a key."""
    if isinstance(structure, dict):
        return {_with_values(key, values): _with_values(item, values) for key, item in structure.items()}
    if isinstance(structure, list):
        return [_with_values(item, values) for item in structure]
    if isinstance(structure, str) and structure.startswith(MARK):
        return _plain(values[int(structure.removeprefix(MARK))])
    return structure


def _plain(value: object) -> Any:
    """As JSON has it, and nobody else's."""
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
