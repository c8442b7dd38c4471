"""Values of other tools' files as values of a job's fields, and a tool as the table of its keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil, isfinite
from types import MappingProxyType
from typing import Any

from lockstep.api.errors import ConfigError
from lockstep.api.model import spelled
from lockstep.plan.discovery.draft import Item
from lockstep.plan.translate.leaves import Leaf

Values = Mapping[str, Any]
"""Values of a file by their paths, without the numbers of list entries."""
Beside = Callable[[str], str | None]
"""Reads a file by its path in another tool's file. A folder is empty text; None: it isn't there."""
DIFFERS = "the result may differ: "
"""Begins what is said of a key that changes what is learned."""
AS_SCRIPT = "lockstep init job NAME --script writes a job that runs the program itself"
UNSET = "the script sets no such variable, or several values of it"
Refused = tuple[tuple[str, str], ...]
"""Name of a training that isn't Lockstep's, and words KEY=VALUE that ask for it; KEY alone: all other values that are set. The name "" is
Lockstep's own training.
"""


@dataclass(frozen=True)
class To:
    """A field of spec.training (hangTimeouts, env: of spec) that a key becomes."""

    field: str
    read: Callable[[Any], Any]
    """Raises ValueError saying why a value can't be."""


@dataclass(frozen=True)
class Moved:
    """A value that belongs into another field than its key's, or has something to say."""

    field: str
    value: Any
    note: str


@dataclass(frozen=True)
class OtherTool:
    """Another trainer: how its files are known, and what its keys mean where others don't have them, or mean something else by them."""

    name: str
    marks: str
    """Keys by which its files are told from those of others."""
    keys: Mapping[str, To | str]
    """Key → the field that it becomes, or the reason why it becomes none."""
    refused: Refused = ()
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Field → value, where the tool's own default isn't Lockstep's; of the learning rate, one for each method."""
    unset: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Key → what follows where it isn't there, and no field can say it."""
    is_full: Callable[[Values], bool] = lambda values: False
    """Tells whether every weight is trained."""
    datasets: tuple[str, ...] = ()
    """Keys that name data sets; those that begin with eval, val or test, data sets to evaluate."""
    lists: tuple[str, ...] = ()
    """Keys of lists of data sets, with a key for each of their properties."""
    seen: tuple[str, ...] = ()
    """Keys of names that tell of pictures or sound, unless a list of data sets says otherwise."""
    needs: str = ""
    """Key that each of its files has."""
    least: int = 0
    """Samples of a step that the tool accumulates to where no number is stated."""

    def refusal(self, leaf: Leaf, source: str, other: str) -> ConfigError:
        """The error for another training, in the words of its file."""
        value = leaf.value if not isinstance(leaf.value, list) else ", ".join(map(str, leaf.value))
        return ConfigError(
            f"{source}:{leaf.line}: {leaf.path}: {value}: is {other}, and Lockstep's trainer learns answers and text alone; to run"
            f" {self.name} itself: {AS_SCRIPT}"
        )


def is_on(value: Any) -> bool:
    """Return False for a value by which tools switch something off."""
    return value not in (None, False, 0, "", "none", "None", "false", "False") and value != []


def one(value: Any) -> str:
    text = str(value[0]) if isinstance(value, list) and len(value) == 1 else value
    if isinstance(text, list) or not str(text).strip():
        raise ValueError("must be one name or path")
    return str(text)


def whole(value: Any) -> int:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if isinstance(value, bool) or not number.is_integer():
        raise ValueError("must be a whole number here")
    return int(number)


def at_least(least: int, reason: str, most: float = float("inf")) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if not least <= whole(value) <= most:
            raise ValueError(reason)
        return whole(value)

    return read


def number(value: Any) -> str:
    try:
        read = None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        read = None
    if read is None or not isfinite(read):
        raise ValueError("must be a number")
    return spelled(read)


def epochs(value: Any) -> int | Moved:
    """Return whole passes: parts of one are rounded up, which is said."""
    passes = float(number(value))
    if passes <= 0:
        raise ValueError("optimization.maxSteps states how long to train")
    if passes.is_integer():
        return int(passes)
    return Moved("optimization.epochs", ceil(passes), f"{spelled(passes)} passes, rounded up: optimization.maxSteps can end within one")


_SCHEDULES = {
    "cosine": "Cosine", "cosine_with_min_lr": "Cosine", "none": "Cosine", "linear": "Linear", "constant": "Constant",
    "constant_with_warmup": "Constant", "warmuplr": "Constant", "warmupdecaylr": "Linear", "warmupcosinelr": "Cosine",
}  # fmt: skip


def schedule(value: Any) -> str | Moved:
    """Return the schedule of a name, or the nearest one, which is said."""
    name = str(value).lower()
    if name in _SCHEDULES:
        return _SCHEDULES[name]
    nearest = "Linear" if "poly" in name else "Cosine" if re.search("cos|rex|one_?cycle", name) else "Constant"
    return Moved("optimization.schedule", nearest, f"{DIFFERS}it is the nearest of Cosine, Linear and Constant")


def optimizer(value: Any) -> None:
    """Say that the optimizer is AdamW. Raises ValueError, always."""
    is_same = re.match("(paged_)?adamw", str(value).lower()) or str(value).lower() in ("adam", "none", "default", "deepspeed")
    raise ValueError(("" if is_same else DIFFERS) + "the optimizer is torch's AdamW")


def warm_up(value: Any) -> str:
    if float(number(value)) <= 0:
        raise ValueError("no warm-up of so many steps")
    return number(value)


def lowest_rate(value: Any) -> str | Moved:
    """Return the part of the learning rate that it falls to; one that doesn't fall is another schedule."""
    ratio = float(number(value))
    return number(value) if ratio < 1 else Moved("optimization.schedule", "Constant", "a rate that doesn't fall")


ALL_LINEAR: list[Item] = []
"""Stands for all linear layers, until the model is known."""


def names(value: Any) -> list[Item]:
    """Return names of layers. Of a pattern whose last part names them, such as `…\\.(q|k|v)_proj`, these names."""
    listed = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(listed, list) or not listed or not all(isinstance(name, str) and name for name in listed):
        raise ValueError("must be a list of names")
    if listed in (["all-linear"], ["all"], ["all_linear"]):
        return ALL_LINEAR
    if isinstance(value, str) and (parts := re.search(r"\(([\w|]+)\)(\w*)\$?$", value)):
        listed = [name + parts[2] for name in parts[1].split("|")]
    if odd := next((name for name in listed if not re.fullmatch(r"[\w.-]+", name)), None):
        raise ValueError(f"{odd} is a pattern, and a job lists names of layers: state lora.targetModules")
    return [Item(name) for name in listed]


def switch(value: Any) -> bool:
    read = {"true": True, "false": False}.get(str(value).lower())
    if read is None:
        raise ValueError("must be true or false")
    return read


def recomputed(value: Any) -> str:
    """Return Auto for true: it computes again what memory needs."""
    return "Auto" if value in ("offload", "offload_disk", "unsloth") or switch(value) else "None"


def word(words: Mapping[str, Any], otherwise: str) -> Callable[[Any], Any]:
    """Read one of these words, in any case."""

    def read(value: Any) -> Any:
        if str(value).lower() not in words:
            raise ValueError(otherwise)
        return words[str(value).lower()]

    return read


def only_if_true(value: Any, otherwise: str) -> Callable[[Any], Any]:
    return word(dict.fromkeys(("true", "auto", "full", "1"), value), otherwise)


def resumed(value: Any) -> str:
    if isinstance(value, str) and value.startswith("/"):
        return value
    is_path = isinstance(value, str) and "/" in value
    raise ValueError((DIFFERS if is_path else "") + "checkpoint.resumeFrom is Auto by default: a job goes on from its newest checkpoint")


def held_out(value: Any) -> str | Moved:
    """Return the share that is held out. A number of samples says only how many to evaluate."""
    share = float(number(value))
    if share <= 0:
        raise ValueError("nothing is held out, as in a job without evaluation")
    if share < 1:
        return spelled(share)
    return Moved("evaluation.samples", whole(value), "at most so many; evaluation.holdout is the share that is held out")


def split_or_share(value: Any) -> str | Moved:
    """Return the share that is held out, or the name of a split."""
    try:
        return held_out(value)
    except ValueError:
        if is_on(value) and isinstance(value, str):
            return Moved("evaluation.data.split", value, "a split")
        raise


_TRACKERS = {"tensorboard": "TensorBoard", "wandb": "WandB", "mlflow": "MLflow"}


def trackers(value: Any) -> list[Item]:
    """Return the trackers that Lockstep has; none of them is an error, while `none` is an empty list."""
    listed = [str(one).lower() for one in (value if isinstance(value, list) else re.split(r"[\s,]+", str(value)))]
    read = [Item(_TRACKERS[one]) for one in listed if one in _TRACKERS]
    if not read and listed != ["none"]:
        raise ValueError("reportTo lists the trackers: TensorBoard by default")
    return read
