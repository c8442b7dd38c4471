"""The base of every API model, the types they share, and rules that hold in Python and in the API server alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel


@dataclass(frozen=True)
class Rule:
    """A rule across fields: its CEL for the API server, the message people see, and the same check in Python.

    `holds` is None for a transition rule (one that uses oldSelf), which only the API server can judge.
    `field` is the field the error points at, relative to the model.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool] | None
    field: str = ""


class Model(BaseModel):
    """camelCase outside, snake_case inside; unknown fields are errors; values never change after parsing."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)
    RULES: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        for rule in self.RULES:
            if rule.holds is not None and not rule.holds(self):
                raise ValueError(rule.message)
        return self

    def to_dict(self) -> dict[str, Any]:
        """The object as it is written in YAML: camelCase, unset optional fields left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def immutable(field: str, why: str) -> Rule:
    """A transition rule: `field` (camelCase, optional) may not be set, changed or removed after creation."""
    return Rule(
        cel=f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})",
        message=f"{field} may not be changed after creation: {why}",
        holds=None,
        field=field,
    )


DECIMAL_PATTERN = r"^[0-9]+(\.[0-9]+)?([eE]-?[0-9]{1,2})?$"
Decimal = Annotated[str, Field(pattern=DECIMAL_PATTERN, max_length=24)]
"""A non-negative number written as text: the API has no floats, whose rounding differs between clients."""

QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
Quantity = Annotated[str, Field(pattern=QUANTITY_PATTERN, max_length=32)]
"""A Kubernetes quantity, e.g. 100Gi or 500m."""

DNS_LABEL_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DnsLabel = Annotated[str, Field(pattern=DNS_LABEL_PATTERN, max_length=63)]
DNS_NAME_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
DnsName = Annotated[str, Field(pattern=DNS_NAME_PATTERN, max_length=253)]
ENV_NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
EnvName = Annotated[str, Field(pattern=ENV_NAME_PATTERN, max_length=128)]
ABSOLUTE_PATH_PATTERN = r"^/[^\x00]*$"
AbsolutePath = Annotated[str, Field(pattern=ABSOLUTE_PATH_PATTERN, max_length=1024)]
Image = Annotated[str, Field(pattern=r"^[^\s]+$", max_length=512)]
LABEL_KEY_PATTERN = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
LabelKey = Annotated[str, Field(pattern=LABEL_KEY_PATTERN, max_length=317)]
LabelValue = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$", max_length=63)]
