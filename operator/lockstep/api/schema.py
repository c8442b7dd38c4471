"""The models as structural OpenAPI schemas, the subset of JSON schema that a CustomResourceDefinition may hold.

Differences from what pydantic writes, each a rule of apiextensions: no $ref, no anyOf with null (optional is "not
required"), no patternProperties and no additionalProperties beside properties, const as an enum of one, and an object
whose fields have defaults needs a default of its own.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from lockstep.api.model import DEPRECATED, DNS_NAME_MAX, LABEL_KEY_PATTERN, LABEL_KEY_PREFIX, NUMBER_BOUNDS, Model, Rule
from lockstep_spec.words import listed

Schema = dict[str, Any]

COPIED = (
    "type", "format", "description", "enum", "pattern", "minLength", "maxLength", "minimum", "maximum", "minItems", "maxItems",
    "maxProperties", "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-validations",
)  # fmt: skip

LABEL_KEY_RULE = {
    "rule": f"self.all(k, k.size() <= 317 && k.indexOf('/') <= {DNS_NAME_MAX} && k.matches('{LABEL_KEY_PATTERN}'))",
    "message": "keys must be label keys such as rack or example.com/rack",
}
NEITHER_NUMBER_NOR_TEXT = {
    "x-kubernetes-preserve-unknown-fields": True, "maxItems": 0, "maxProperties": 0, "not": {"enum": [True, False, [], {}]},
}  # fmt: skip
"""A schema with a type takes numbers or text and not both; one without takes everything, so that what is neither is left out by name."""
PREFIX_RULE = {"rule": f"self.indexOf('/') <= {DNS_NAME_MAX}", "message": LABEL_KEY_PREFIX}


def structural_schema(model: type[BaseModel], *, described: bool = True) -> Schema:
    """The schema of one model and everything in it, ready for openAPIV3Schema. `described`: fields have their texts, which takes most of
    the time.
    """
    raw = model.model_json_schema(by_alias=True)
    definitions = raw.pop("$defs", {}) | {model.__name__: raw}
    models = _models_in(model)
    for name, kind in models.items():
        if described:
            _describe(definitions[name], kind)
    rules = {name: kind.RULES if issubclass(kind, Model) else () for name, kind in models.items()}
    return _structural(raw, definitions, rules)


def _describe(schema: Schema, kind: type[BaseModel]) -> None:
    """Give the schema of each field the text that stands below it in its class.

    pydantic could do so by itself (use_attribute_docstrings), but for every process that imports the models, which took a fifth of their
    import.
    """
    texts = {name: text for base in reversed(kind.__mro__) if issubclass(base, Model) for name, text in _texts_below_fields(base)}
    for name, field in kind.model_fields.items():
        if name in texts:
            schema["properties"][field.alias or name].setdefault("description", texts[name])


def _texts_below_fields(kind: type[BaseModel]) -> Iterator[tuple[str, str]]:
    for pair in pairwise(_classes_in(kind.__module__)[kind.__name__].body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, text


@cache
def _classes_in(module: str) -> dict[str, ast.ClassDef]:
    """Map class names of a module to its source, parsed once: inspect.getsource of a class would read the whole module each time."""
    return {node.name: node for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))) if isinstance(node, ast.ClassDef)}


def _models_in(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The model and every model inside it, by class name."""
    models: dict[str, type[BaseModel]] = {}
    waiting: list[Any] = [model]
    while waiting:
        kind = waiting.pop()
        waiting.extend(getattr(kind, "__args__", ()))
        if isinstance(kind, type) and issubclass(kind, BaseModel) and kind.__name__ not in models:
            models[kind.__name__] = kind
            waiting.extend(field.annotation for field in kind.model_fields.values())
    return models


def _structural(raw: Schema, definitions: dict[str, Schema], rules: dict[str, tuple[Rule, ...]]) -> Schema:
    merged = _resolved(raw, definitions)
    result: Schema = {key: merged[key] for key in COPIED if key in merged}
    if "description" in result:
        instead, *values = merged.get(DEPRECATED, [""])
        words = f" Deprecated{f' ({listed(values)})' if values else ''}: {instead}." if instead else ""
        result["description"] = " ".join(result["description"].split()) + words
    if "const" in merged:
        result |= {"type": "string", "enum": [merged["const"]]}
    if NUMBER_BOUNDS in merged:
        result = _without(result, "type") | NEITHER_NUMBER_NOR_TEXT | merged[NUMBER_BOUNDS]
    if merged.get("pattern") == LABEL_KEY_PATTERN:
        result["x-kubernetes-validations"] = [PREFIX_RULE]
    if "items" in merged:
        result["items"] = _structural(merged["items"], definitions, rules)
    if merged.get("type") == "object":
        result |= _object(merged, definitions, rules)
    return result | _default(merged, result)


def _resolved(raw: Schema, definitions: dict[str, Schema]) -> Schema:
    """`raw` with its $ref and its "or null" written out; what stands beside them wins."""
    for reference in (option for option in raw.get("anyOf", [raw]) if option.get("type") != "null"):
        if "$ref" in reference:
            return {**definitions[reference["$ref"].removeprefix("#/$defs/")], **_without(raw, "$ref", "anyOf")}
        if reference is not raw:
            return {**reference, **_without(raw, "anyOf")}
    return raw


def _without(schema: Schema, *keys: str) -> Schema:
    return {key: value for key, value in schema.items() if key not in keys}


def _object(merged: Schema, definitions: dict[str, Schema], rules: dict[str, tuple[Rule, ...]]) -> Schema:
    if "properties" not in merged:
        return _map(merged, definitions, rules)
    result: Schema = {"properties": {name: _structural(schema, definitions, rules) for name, schema in merged["properties"].items()}}
    if merged.get("required"):
        result["required"] = list(merged["required"])
    own = rules.get(merged.get("title", ""), ())
    for rule in own:
        result |= rule.schema or {}
    written = [validation(rule) for rule in own if rule.cel]
    return result | ({"x-kubernetes-validations": written} if written else {})


def _map(merged: Schema, definitions: dict[str, Schema], rules: dict[str, tuple[Rule, ...]]) -> Schema:
    patterns: Schema = merged.get("patternProperties", {})
    if merged.get("additionalProperties") is True:
        return {"x-kubernetes-preserve-unknown-fields": True}
    values: Schema = next(iter(patterns.values())) if patterns else merged["additionalProperties"]
    result: Schema = {"additionalProperties": _structural(values, definitions, rules)}
    return result | ({"x-kubernetes-validations": [LABEL_KEY_RULE]} if LABEL_KEY_PATTERN in patterns else {})


def validation(rule: Rule) -> Schema:
    """The rule as an entry of x-kubernetes-validations."""
    return {"rule": rule.cel, "message": rule.message} | ({"fieldPath": f".{rule.field}"} if rule.field else {})


def _default(merged: Schema, result: Schema) -> Schema:
    """A default that people see in the stored object. None, empty lists and maps are left out: absent says the same.

    An object's is written out: the API server checks rules against it before it fills in what is inside.
    """
    default = merged.get("default")
    if "properties" in result:
        inner = {name: schema["default"] for name, schema in result["properties"].items() if "default" in schema}
        return {"default": inner} if inner and default is not None else {}
    return {} if default is None or default in ([], {}, "") or "const" in merged else {"default": default}
