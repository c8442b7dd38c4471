"""Parts of a status: how their models are built from what was observed, and read back from what is stored, without checks that would refuse
it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, ParamSpec, Self, TypeVar, cast

from pydantic import Field

from lockstep.api.model import Model

P = ParamSpec("P")
Part = TypeVar("Part", bound="StatusPart")

Time = Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})]
TEXT_MAX = 1024
Text = Annotated[str, Field(max_length=TEXT_MAX)]
Count = Annotated[int, Field(ge=0)]


class StatusPart(Model):
    """Part of a status. It is read and built unchecked: `plan.reconcile.status.fitted` bounds the whole status at the end, by the schema of
    these models.
    """

    @classmethod
    def stored(cls, value: object) -> Self | None:
        """Return the part as status has it; None if status has none. Unknown fields are left out, and nothing else is checked."""
        if not isinstance(value, dict):
            return None
        present = ((name, part, value[alias]) for alias, name, part in _fields(cls) if value.get(alias) is not None)
        return _built(cls, {name: item if part is None else _stored(part, item) for name, part, item in present})

    def to_dict(self) -> dict[str, Any]:
        """Return the part as it is stored: camelCase, and only the fields that were given and are not None."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True, warnings=False)


def unchecked(model: Callable[P, Part], *_: P.args, **fields: P.kwargs) -> Part:
    """Return a part with these fields, whatever their values: what a pod reports may be of any size. Types are checked where it is
    called.
    """
    return _built(cast(type[Part], model), fields)


def taken_from(source: object, model: type[Part], **others: Any) -> Part:
    """Return a part with `others`, and with what `source` has under the names of its other fields; unchecked, too."""
    same = {name: getattr(source, name) for _, name, _ in _fields(model) if name not in others and hasattr(source, name)}
    return _built(model, {name: list(value) if isinstance(value, tuple) else value for name, value in same.items()} | others)


def _built(model: type[Part], fields: dict[str, Any]) -> Part:
    return cast(Part, _blank(model).model_copy(update=fields))


@cache
def _blank(model: type[StatusPart]) -> StatusPart:
    """Return a part of which nothing is given: a copy of it costs a third of what pydantic takes for a new one."""
    return model.model_construct()


@cache
def _fields(model: type[StatusPart]) -> tuple[tuple[str, str, type[StatusPart] | None], ...]:
    """(camelCase, snake_case, the model of the field or of its items) of each field."""
    return tuple((field.alias or name, name, _part_in(field.annotation)) for name, field in model.model_fields.items())


def _part_in(annotation: Any) -> type[StatusPart] | None:
    if isinstance(annotation, type) and issubclass(annotation, StatusPart):
        return annotation
    return next(filter(None, map(_part_in, getattr(annotation, "__args__", ()))), None)


def _stored(part: type[StatusPart], value: object) -> object:
    return [item for item in map(part.stored, value) if item is not None] if isinstance(value, list) else part.stored(value)
