"""Identity that a run must share with a commit to go on from it (pure).

Another module adds its own part by one entry in `settings`: the path below `training`, and a value that JSON can hold. Settings
that stand at their defaults are left out, so that a commit from before a setting existed still fits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from lockstep_spec.choices import Method, Quantization
from lockstep_spec.codec import at_least
from lockstep_spec.training import LoraConfig, TrainingConfig

SHOWN = 12


@dataclass(frozen=True)
class Identity:
    base: str
    """Hash of the model's configuration and a sample of its weights: what is compared where one of the two has no `base_files`."""
    parameters: str
    """Hash of the names and shapes of the trainable parameters."""
    dataset: str
    """Hash of the samples in their order."""
    seed: int
    global_batch_size: Annotated[int, at_least(0)]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Path below `training` → value: what else must be the same."""
    base_files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each file of the base model, compared before all else (model/base_files.py). Empty in commits from before they were
    recorded.
    """
    data_files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each data file, to name the one that makes another dataset."""

    def differences(self, other: Identity) -> list[str]:
        """Differences of `other`, in the words of the job file."""
        compared = {name: words for name, words in _WORDS.items() if name != "base" or not (self.base_files and other.base_files)}
        pairs = [(words, getattr(self, name), getattr(other, name)) for name, words in compared.items()]
        if self.dataset != other.dataset:
            pairs += [
                (f"the SHA-256 of {path}", self.data_files[path], other.data_files[path])
                for path in self.data_files.keys() & other.data_files
            ]
        keys = dict.fromkeys([*self.settings, *other.settings])
        pairs += [(key, self.settings.get(key), other.settings.get(key)) for key in keys]
        # The parameters follow from the settings: their hash says something only when no setting does.
        pairs.append(("the set of trainable parameters", self.parameters, other.parameters))
        different = [(words, mine, theirs) for words, mine, theirs in pairs if mine != theirs]
        shown = different[:-1] if len(different) > 1 and different[-1][1] == self.parameters else different
        return [f"{words} is {_short(mine)}, not {_short(theirs)}" for words, mine, theirs in shown]


_WORDS = {
    "base": "the base model",
    "dataset": "the dataset",
    "seed": "the seed",
    "global_batch_size": "globalBatchSize",
}


def _short(value: object) -> str:
    if value is None:
        return "the default"
    if isinstance(value, str):
        return value[:SHOWN]
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else json.dumps(value)


def parameters_digest(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return hashlib.sha256(json.dumps(sorted((name, list(shape)) for name, shape in shapes.items())).encode()).hexdigest()


def training_settings(training: TrainingConfig) -> dict[str, Any]:
    """Settings that decide which function is trained and how a parameter is to be read."""
    settings = lora_settings(training.lora) if training.method is Method.LORA else {"method": training.method.value}
    if training.model.quantization is not Quantization.NONE:
        settings["model.quantization"] = training.model.quantization.value
    return settings


def lora_settings(lora: LoraConfig) -> dict[str, Any]:
    settings = {
        "rank": lora.rank,
        "alpha": lora.alpha,
        "targetModules": sorted(lora.target_modules),
        "targetParameters": sorted(lora.target_parameters),
        "modulesToSave": sorted(lora.modules_to_save),
        "rankStabilized": lora.rank_stabilized,
        "dora": lora.dora,
    }
    return {f"lora.{key}": value for key, value in settings.items() if value}
