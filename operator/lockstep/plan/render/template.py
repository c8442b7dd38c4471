"""YAML templates to plain objects. Templates hold structure only: every value goes in through `tojson`."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import TYPE_CHECKING, Any

from lockstep.api import names
from lockstep.api.files.yamltext import load_yaml

if TYPE_CHECKING:
    from jinja2 import Environment

NOT_YAML = re.compile("[^\n -~\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
"""Characters that JSON holds as they are and YAML doesn't, or folds as line ends."""


def _tojson(value: object) -> str:
    """Return `value` as JSON that YAML reads back. Jinja's own filter writes 😀 as two escapes, which YAML doesn't join."""
    return NOT_YAML.sub(lambda character: f"\\u{ord(character[0]):04x}", json.dumps(value, ensure_ascii=False))


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # a job without pods fills nothing

    loader = PackageLoader("lockstep.plan.render")
    environment = Environment(loader=loader, undefined=StrictUndefined, autoescape=False, trim_blocks=True, lstrip_blocks=True)  # noqa: S701 (not HTML)
    environment.filters["tojson"] = _tojson
    environment.globals = {"names": names}  # whose constants are no values of a job; Jinja's own would hide names such as `namespace`
    return environment


def fill(template: str, **values: object) -> dict[str, Any]:
    """Return the object that `templates/<template>.yaml.j2` makes of `values`; fields that are empty or None are left out.

    Raises TypeError or jinja2.UndefinedError for a value that the template needs and that isn't given.
    """
    text = _environment().get_template(f"{template}.yaml.j2").render(values)
    result: dict[str, Any] = _without_empty(load_yaml(text))
    return result


def _without_empty(value: Any) -> Any:
    """Drop empty fields, as the API server does, so that an object doesn't differ from what it stores.

    Kept: the empty object that chooses a variant, such as `emptyDir: {}`, and empty strings, which are values.
    """
    if isinstance(value, dict):
        filled = {key: _without_empty(item) for key, item in value.items() if item is not None}
        return {key: item for key, item in filled.items() if item != [] and (item != {} or key == "emptyDir")}
    if isinstance(value, list):
        return [_without_empty(item) for item in value]
    return value
