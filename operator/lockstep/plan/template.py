"""YAML templates to plain objects. Templates hold structure only: every value goes in through `tojson`."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with it


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def to_yaml_json(value: object) -> str:
    """`value` as JSON that YAML reads back unchanged.

    Not Jinja's own filter: plain JSON lets DEL through, which YAML refuses, and writes characters beyond U+FFFF as two
    surrogates, which YAML reads as two broken characters.
    """
    text = json.dumps(value, ensure_ascii=False)
    return "".join(character if " " <= character <= "~" else _escaped(character) for character in text)


@cache
def _environment() -> Environment:
    environment = Environment(loader=PackageLoader("lockstep.plan"), undefined=StrictUndefined, autoescape=False)  # noqa: S701 (not HTML)
    environment.filters["tojson"] = to_yaml_json
    return environment


def fill(template: str, **values: object) -> dict[str, Any]:
    """The object that `templates/<template>.yaml.j2` makes of `values`; fields that are empty or None are left out."""
    text = _environment().get_template(f"{template}.yaml.j2").render(values)
    result: dict[str, Any] = _without_empty(yaml.load(text, Loader=_Loader))  # noqa: S506 (a safe loader)
    return result


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
