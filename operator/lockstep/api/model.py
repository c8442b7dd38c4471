"""The base of every API model, the types they share, and rules that hold in Python and in the API server alike."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal as ExactDecimal
from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel, to_snake
from pydantic_core import PydanticCustomError

from lockstep_spec.modelnames import LOGIN_PATTERN, NO_LOGIN_PATTERN, SIGNATURE_PATTERN, holds_password


@dataclass(frozen=True)
class Rule:
    """A rule across fields: its CEL for the API server, the message people see, and the same check in Python.

    `holds` is None for a transition rule (one that uses oldSelf), which only the API server can judge. `cel` is empty where CEL can't read
    the fields: then the API server goes by `schema` alone.
    `field` is the field the error points at, relative to the model: dotted, in camelCase.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool] | None
    field: str = ""
    schema: Mapping[str, Any] | None = None
    """Further parts of the model's JSON schema: CEL can't read a field that is a number or text."""


class RulesBroken(ValueError):
    """All rules of one model that its values break, so that a reader hears of every one at once."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        super().__init__("; ".join(rule.message for rule in rules))
        self.rules = rules


def list_map(key: str = "name") -> dict[str, Any]:
    """JSON schema of a list whose items differ in one field: API server and Python refuse two of the same."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


def list_set() -> dict[str, Any]:
    """JSON schema of a list of values of which none may be there twice."""
    return {"x-kubernetes-list-type": "set"}


DEPRECATED = "x-lockstep-deprecated"


def deprecated(instead: str, *values: str) -> dict[str, Any]:
    """JSON schema of a field of which, or of these values of which, people are warned; it goes on working. `instead`: `use place`."""
    return {DEPRECATED: [instead, *values]}


class Model(BaseModel):
    """camelCase outside, snake_case inside; unknown fields are errors; values never change after parsing."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)
    RULES: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        own = [Rule("", message, None, field) for field, message in (*_repeated(self), *self._problems())]
        broken = [rule for rule in self.RULES if rule.holds is not None and not rule.holds(self)]
        if own or broken:
            raise RulesBroken((*own, *broken))
        return self

    def _problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, message) of what no rule can say, since the message depends on the values."""
        return iter(())

    def to_dict(self) -> dict[str, Any]:
        """The object as it is written in YAML: camelCase, unset optional fields left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def _repeated(model: Model) -> list[tuple[str, str]]:
    """(field, message) of every list that holds something twice though its schema says map or set."""
    messages = []
    for name, info in type(model).model_fields.items():
        schema = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        keys = schema.get("x-kubernetes-list-map-keys")
        items: list[Any] = list(getattr(model, name) or []) if "x-kubernetes-list-type" in schema else []
        if isinstance(keys, list):
            items = [item.to_dict()[str(keys[0])] for item in items]
        field = info.alias or name
        messages += [(field, f"{field} holds {text!r} twice") for text in dict.fromkeys(x for x in items if items.count(x) > 1)]
    return messages


def deprecations(model: Model, path: str) -> Iterator[str]:
    """Sentences about deprecated fields and values of `model`, at `path`, that aren't as the defaults have them."""
    for name, info in type(model).model_fields.items():
        if (value := getattr(model, name)) == info.get_default(call_default_factory=True):
            continue
        place, extra = f"{path}.{info.alias or name}", cast(dict[str, Any], info.json_schema_extra or {})
        instead, *values = extra.get(DEPRECATED, [""])
        if instead and (not values or value in values):
            yield f"{place}{f': {value}' if values else ''} is deprecated: {instead}"
        for part in value if isinstance(value, list) else [value]:
            yield from deprecations(part, place) if isinstance(part, Model) else ()


def utf8_bytes(texts: Iterable[str | None]) -> int:
    """Bytes of all of them together."""
    return sum(len((text or "").encode(errors="replace")) for text in texts)


def immutable(field: str, why: str, *, from_unset: bool = False) -> Rule:
    """A transition rule: `field` (camelCase, optional) may not be changed or removed after creation, nor set unless `from_unset`."""
    return Rule(
        cel=f"!has(oldSelf.{field}) || (has(self.{field}) && self.{field} == oldSelf.{field})"
        if from_unset
        else f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})",
        message=f"{field} may not be changed after creation{', except from unset' if from_unset else ''}: {why}",
        holds=None,
        field=field,
    )


def exactly_one(*fields: str) -> Rule:
    """One of these optional fields (camelCase) is set, and no other."""
    names = [to_snake(field) for field in fields]
    return Rule(
        cel=f"[{', '.join(f'has(self.{field})' for field in fields)}].filter(x, x).size() == 1",
        message=f"must have exactly one of {', '.join(fields[:-1])} and {fields[-1]}",
        holds=lambda model: sum(getattr(model, name) is not None for name in names) == 1,
    )


def no_password(field: str) -> Rule:
    """`field` may be an address, which everybody who sees the job can read."""
    value = f"self.{field}"
    login = f"{value}.matches('{LOGIN_PATTERN}') && !{value}.matches('{NO_LOGIN_PATTERN}')"
    return Rule(
        f"!has({value}) || !(({login}) || {value}.matches('{SIGNATURE_PATTERN}'))",
        f"{field} must not contain a password or a port (: or @ before an address's first /, or sig=): pass an object store's credentials"
        " in env",
        lambda o: not holds_password(getattr(o, field) or ""),
        field=field,
    )


FREE_FORM_BYTES_MAX = 64 << 10
FREE_FORM_LEVELS_MAX = 32


def free_form_fits(settings: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return `settings` if it is within the limits for size and nesting: the API server itself takes 1.5 MB and 10,000 levels.

    Raises ValueError.
    """
    level: list[Any] = [settings or {}]
    for _ in range(FREE_FORM_LEVELS_MAX):
        level = [
            inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer) if isinstance(inner, dict | list)
        ]
    if level:
        raise PydanticCustomError("too_deep", f"is nested deeper than {FREE_FORM_LEVELS_MAX} levels: make it flatter")
    size = utf8_bytes([json.dumps(settings, ensure_ascii=False, default=str)])
    if size > FREE_FORM_BYTES_MAX:
        raise PydanticCustomError("too_large", f"has {size} bytes as JSON, but at most {FREE_FORM_BYTES_MAX} are allowed: shorten it")
    return settings


DECIMAL_PATTERN = r"^[0-9]+(\.[0-9]+)?([eE](-[0-9]{1,3}|[0-9]{1,2}))?$"
ZERO_PATTERN = r"^0+(\.0+)?([eE]-?[0-9]{1,3})?$"
SHARE_PATTERN = (
    r"^(0\.0*[1-4][0-9]*|0\.0+[1-9][0-9]*|0\.50*|([1-4](\.[0-9]+)?|5(\.0+)?)[eE]-1|[1-9](\.[0-9]+)?[eE]-([2-9]|[1-9][0-9]{1,2}))$"
)
FRACTION_PATTERN = r"^(0+(\.[0-9]+)?([eE]-[0-9]{1,3})?|[0-9](\.[0-9]+)?[eE]-[1-9][0-9]{0,2})$"
DECIMAL_LENGTH = 24
DECIMAL_MAX = 10**15  # a JSON schema's bound for whole numbers must be a 64-bit one itself
NUMBER_BOUNDS = "x-lockstep-number"
"""Key in the models' JSON schemas of the bounds of a field that takes a number, or the same number as text."""


def spelled(number: float) -> str:
    """The one text of a number: below a thousandth with an exponent, as learning rates are written, else without where it is short."""
    if 0 < number < 1e-3:
        digits, exponent = f"{ExactDecimal(repr(number)).normalize():e}".lower().split("e")
        return f"{digits}e{int(exponent)}"
    return str(int(number)) if number == int(number) else repr(number)


def _number_or_text(pattern: str, words: str, fits: Callable[[float], bool]) -> BeforeValidator:
    """Reads both forms of a number to the same text, so that nothing after it depends on which was written."""
    form = re.compile(pattern)

    def read(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise PydanticCustomError("number", "must be {words}", {"words": words})
        if isinstance(value, str) and (len(value) > DECIMAL_LENGTH or not form.fullmatch(value)):
            return value  # which the pattern refuses
        if not (isinstance(value, str) or 0 <= value <= DECIMAL_MAX) or not fits(float(value)):
            raise PydanticCustomError("number", "{value} is not valid: must be {words}", {"value": value, "words": words})
        text = spelled(float(value))
        return text if len(text) <= DECIMAL_LENGTH else value

    return BeforeValidator(read)


DECIMAL_WORDS = "a number of 0 or more, such as 0.05 or 2e-4"
SHARE_WORDS = "a number greater than 0 and at most 0.5"
FRACTION_WORDS = "a number of 0 or more and less than 1"
Decimal = Annotated[
    str,
    Field(pattern=DECIMAL_PATTERN, max_length=DECIMAL_LENGTH, json_schema_extra={NUMBER_BOUNDS: {"minimum": 0, "maximum": DECIMAL_MAX}}),
    _number_or_text(DECIMAL_PATTERN, DECIMAL_WORDS, lambda number: True),
]
"""A number of 0 or more, written as a number or as text. Kept as text, whose rounding is the same for every client."""
Share = Annotated[
    str,
    Field(
        pattern=SHARE_PATTERN,
        max_length=DECIMAL_LENGTH,
        json_schema_extra={NUMBER_BOUNDS: {"minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}},
    ),
    _number_or_text(SHARE_PATTERN, SHARE_WORDS, lambda number: 0 < number <= 0.5),
]
"""A number greater than 0 and at most 0.5, written and kept as a Decimal."""
Fraction = Annotated[
    str,
    Field(
        pattern=FRACTION_PATTERN,
        max_length=DECIMAL_LENGTH,
        json_schema_extra={NUMBER_BOUNDS: {"minimum": 0, "maximum": 1, "exclusiveMaximum": True}},
    ),
    _number_or_text(FRACTION_PATTERN, FRACTION_WORDS, lambda number: 0 <= number < 1),
]
"""A number of 0 or more and less than 1, written and kept as a Decimal."""

QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
Quantity = Annotated[str, Field(pattern=QUANTITY_PATTERN, max_length=32)]
"""A Kubernetes quantity, e.g. 100Gi or 500m."""
NumberOrQuantity = Annotated[
    str,
    Field(
        pattern=QUANTITY_PATTERN,
        max_length=32,
        json_schema_extra={NUMBER_BOUNDS: {"minimum": 0, "exclusiveMinimum": True, "maximum": DECIMAL_MAX}},
    ),
    _number_or_text("(?!)", "a quantity such as 100Gi, 32 or 500m", lambda number: number > 0),  # (text stays as it is)
]
"""A Quantity, which may also be written as a number, as `cpu: 16`."""

DNS_LABEL_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DnsLabel = Annotated[str, Field(pattern=DNS_LABEL_PATTERN, max_length=63)]
DNS_SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*"  # [.]: a CEL string takes no \.
DNS_NAME_PATTERN = rf"^{DNS_SUBDOMAIN}$"
DNS_NAME_MAX = 253
DnsName = Annotated[str, Field(pattern=DNS_NAME_PATTERN, max_length=DNS_NAME_MAX)]
SERVER_PATTERN = r"^(https?://)?[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?(:[0-9]{1,5})?/?$"
ENV_NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
EnvName = Annotated[str, Field(pattern=ENV_NAME_PATTERN, max_length=128)]
TEXT_PATTERN = r"^[^\x00]*$"
"""Text that a program can get: it ends at the first NUL."""
ABSOLUTE_PATH_PATTERN = r"^/[^\x00]*$"
AbsolutePath = Annotated[str, Field(pattern=ABSOLUTE_PATH_PATTERN, max_length=1024)]
IMAGE_PATTERN = r"^[^\s]+$"
Image = Annotated[str, Field(pattern=IMAGE_PATTERN, max_length=512)]
DAY_PATTERN = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"
QUALIFIED_PART = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
LABEL_KEY_PATTERN = rf"^({DNS_SUBDOMAIN}/)?{QUALIFIED_PART}$"
LABEL_KEY_PREFIX = "the part of a label key before / must have at most 253 characters"


def _prefix_fits(key: str) -> str:
    if key.find("/") > DNS_NAME_MAX:
        raise ValueError(LABEL_KEY_PREFIX)
    return key


LabelKey = Annotated[str, Field(pattern=LABEL_KEY_PATTERN, max_length=317), AfterValidator(_prefix_fits)]
LABEL_VALUE_PATTERN = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
LabelValue = Annotated[str, Field(pattern=LABEL_VALUE_PATTERN, max_length=63)]
