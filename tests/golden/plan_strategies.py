"""Any valid job and any valid cluster, drawn from the models themselves: every field, bound and pattern that they state."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from golden.plan_cases import HOSTILE
from lockstep.api.cluster import TrainingCluster
from lockstep.api.job import TrainingJob, TrainingJobSpec
from lockstep.api.model import Model
from lockstep.api.podtemplate import ExtraVolume, Toleration
from lockstep.api.shared import VariableSet, VariableSource

LONGEST = 3  # items of a list, so that examples stay readable
STATED = 4  # optional fields of an object: of more, most break a rule across fields, and the example is drawn for nothing
Document = dict[str, Any]

# Groups of fields of which a value has exactly one.
ONE_OF: dict[type[Model], tuple[str, ...]] = {
    VariableSource: ("secret_key_ref", "config_map_key_ref", "field_ref"),
    VariableSet: ("secret_ref", "config_map_ref"),
    ExtraVolume: ("config_map", "secret", "persistent_volume_claim", "empty_dir"),
    TrainingJobSpec: ("training", "script"),
}


def _of_a_pod(toleration: Document) -> Document:
    """A toleration as the API server takes it: most that are drawn field by field are not."""
    exists = "key" not in toleration or toleration.get("operator") == "Exists"
    dropped = {"value"} if exists else set()
    dropped |= {"toleration_seconds"} if toleration.get("effect") != "NoExecute" else set()
    return {name: value for name, value in toleration.items() if name not in dropped} | ({"operator": "Exists"} if exists else {})


MENDED: dict[type[Model], Callable[[Document], Document]] = {Toleration: _of_a_pod}


def jobs() -> SearchStrategy[TrainingJob]:
    return _models(TrainingJob)


def profiles() -> SearchStrategy[TrainingCluster]:
    return _models(TrainingCluster)


def _models(kind: type[Any]) -> SearchStrategy[Any]:
    return _document(kind).map(lambda document: _parsed(kind, document)).filter(lambda parsed: parsed is not None)


def _parsed(kind: type[Model], document: Document) -> Model | None:
    try:
        return kind.model_validate(document)
    except ValidationError:  # a rule across fields does not hold
        return None


@st.composite
def _document(draw: st.DrawFn, kind: type[Model]) -> Document:
    group = ONE_OF.get(kind, ())
    chosen = draw(st.sampled_from(group)) if group else None
    fields = _fields(kind)
    optional = [name for name, (required, _) in fields.items() if not required and name not in group]
    stated = draw(st.sets(st.sampled_from(optional), max_size=STATED)) if optional else set()
    document = {name: draw(values) for name, (required, values) in fields.items() if required or name == chosen or name in stated}
    return MENDED.get(kind, dict)(document)


@cache
def _fields(kind: type[Model]) -> dict[str, tuple[bool, SearchStrategy[Any]]]:
    """Whether a field must be there, and its values. Kept: making a strategy from a pattern costs more than drawing from it."""
    return {name: (info.is_required(), _values(_annotation(info))) for name, info in kind.model_fields.items()}


def _annotation(info: FieldInfo) -> Any:
    """The field's type with the bounds that pydantic moved from it into the field."""
    return Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation


def _values(annotation: Any, bounds: dict[str, Any] | None = None) -> SearchStrategy[Any]:  # noqa: PLR0911 (one return a kind of type)
    bounds = bounds or {}
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        return _values(inner, bounds | _bounds(metadata))
    if origin in (Union, UnionType):
        return st.one_of([_values(arg, bounds) for arg in get_args(annotation) if arg is not NoneType])
    if origin is Literal:
        return st.sampled_from(get_args(annotation))
    if origin is list:
        return st.lists(_values(get_args(annotation)[0]), min_size=bounds.get("min_length", 0), max_size=LONGEST)
    if origin is dict:
        key, value = get_args(annotation)
        return st.dictionaries(_values(key), _values(value), max_size=LONGEST)
    if issubclass(annotation, Enum):
        return st.sampled_from([member.value for member in annotation])
    if issubclass(annotation, Model):
        return _document(annotation)
    return _scalars(annotation, bounds)


def _scalars(kind: type, bounds: dict[str, Any]) -> SearchStrategy[Any]:
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.integers(bounds.get("ge"), bounds.get("le"))
    return _texts(bounds.get("pattern"), bounds.get("min_length", 0), bounds.get("max_length", 64))


def _texts(pattern: str | None, shortest: int, longest: int) -> SearchStrategy[str]:
    # All of UTF-8: codec= would encode a million of them to know so.
    alphabet = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
    if pattern is not None:
        return st.from_regex(re.compile(pattern), fullmatch=True, alphabet=alphabet).filter(lambda text: shortest <= len(text) <= longest)
    hostile = [text for text in HOSTILE if shortest <= len(text) <= longest]
    return st.one_of(st.sampled_from(hostile), st.text(alphabet, min_size=shortest, max_size=min(longest, 40)))


def _bounds(metadata: list[Any]) -> dict[str, Any]:
    """min_length, max_length, ge, le and pattern, wherever pydantic put them."""
    found: dict[str, Any] = {}
    for item in metadata:
        if isinstance(item, FieldInfo):
            found |= _bounds(item.metadata)
        for name in ("min_length", "max_length", "ge", "le", "pattern"):
            value = getattr(item, name, None)
            if value is not None:
                found[name] = value
    return found
