"""YAML templates to plain objects. Templates hold structure only: every value goes in through `tojson`.

Neither Jinja nor YAML ever sees a value: a template is rendered and parsed once, with a mark where each value goes, and `fill` replaces the marks.
So no text can become structure, what YAML can't hold (DEL, lone surrogates) passes unchanged, and a job costs no rendering and no parsing.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.meta import find_undeclared_variables

from lockstep.api.files.yamltext import load_yaml

MARK = "\ue000value "
"""A character of private use: no template has it."""


@cache
def _environment() -> Environment:
    environment = Environment(loader=PackageLoader("lockstep.plan.render"), undefined=StrictUndefined, autoescape=False)  # noqa: S701 (not HTML)
    environment.filters["tojson"] = lambda name: f'"{MARK}{name}"'
    return environment


@cache
def _structure(template: str) -> Any:
    """Returns `templates/<template>.yaml.j2`, parsed, with `MARK` and a name where the value of that name goes."""
    name = f"{template}.yaml.j2"
    environment = _environment()
    assert environment.loader is not None  # noqa: S101 (set above)
    source, _, _ = environment.loader.get_source(environment, name)
    names = find_undeclared_variables(environment.parse(source))
    return load_yaml(environment.get_template(name).render({name: name for name in names}))


def fill(template: str, **values: object) -> dict[str, Any]:
    """The object that `templates/<template>.yaml.j2` makes of `values`; fields that are empty or None are left out.

    Raises KeyError for a value that the template needs and that isn't given.
    """
    plain = {name: _plain(value) for name, value in values.items()}
    result: dict[str, Any] = _without_empty(_with_values(_structure(template), plain))
    return result


def _with_values(structure: Any, values: dict[str, Any]) -> Any:
    """A copy with every mark replaced."""
    if isinstance(structure, dict):
        return {key: _with_values(item, values) for key, item in structure.items()}
    if isinstance(structure, list):
        return [_with_values(item, values) for item in structure]
    if isinstance(structure, str) and structure.startswith(MARK):
        return values[structure.removeprefix(MARK)]
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
