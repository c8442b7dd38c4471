"""The manifest: what a commit holds and what it was trained from. Its presence is the commit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

FORMAT = "lockstep-checkpoint/1"


@dataclass(frozen=True)
class FragmentRecord:
    """Elements [start, start + numel) of the flattened parameter `name`."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int


@dataclass(frozen=True)
class ShardRecord:
    """One rank's file: each tensor in it is the concatenation of the fragments in order."""

    file: str
    bytes: int
    sha256: str
    fragments: tuple[FragmentRecord, ...]

    def to_json(self) -> dict[str, Any]:
        fragments = [[item.name, list(item.shape), item.start, item.numel] for item in self.fragments]
        return {"file": self.file, "bytes": self.bytes, "sha256": self.sha256, "fragments": fragments}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> ShardRecord:
        fragments = tuple(FragmentRecord(name, tuple(shape), start, numel) for name, shape, start, numel in value["fragments"])
        return ShardRecord(value["file"], value["bytes"], value["sha256"], fragments)


@dataclass(frozen=True)
class Identity:
    """What a run must share with a commit to go on from it. Each field's name is what a refusal says."""

    base: str
    """Hash of the model's configuration and a sample of its weights."""
    rank: int
    alpha: int
    target_modules: tuple[str, ...]
    parameters: str
    """Hash of the names and shapes of the trainable parameters."""
    dataset: str
    seed: int
    global_batch_size: int

    def differences(self, other: Identity) -> list[str]:
        """What `other` has otherwise, in words."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{_WORDS[key]} is {_short(mine[key])}, not {_short(theirs[key])}" for key in mine if mine[key] != theirs[key]]


_WORDS = {
    "base": "the base model",
    "rank": "lora.rank",
    "alpha": "lora.alpha",
    "target_modules": "lora.targetModules",
    "parameters": "the set of trainable parameters",
    "dataset": "the dataset",
    "seed": "the seed",
    "global_batch_size": "globalBatchSize",
}


def _short(value: object) -> str:
    if isinstance(value, str):
        return value[:12]
    return ", ".join(value) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class Manifest:
    step: int
    attempt: int
    job: str
    job_uid: str | None
    world_size: int
    zero_stage: str
    precision: str
    base_model: str
    identity: Identity
    samples_consumed: int
    """The data cursor."""
    optimizer_step: int
    eval_loss_before: str | None
    """Loss before the first step of the whole run, so that the end can tell what was gained."""
    adapter: dict[str, Any]
    """`config`: adapter_config.json; `names`: parameter → tensor of the adapter file."""
    shards: tuple[ShardRecord, ...]
    content: str = "Full"
    """`Full`: the shards hold masters and moments; `Lite`: the trained weights alone (checkpoint/kinds.py has the tensors' names)."""
    loss_scaler: dict[str, Any] | None = None
    """FP16 only: what the dynamic loss scaler knows."""

    def to_json(self) -> dict[str, Any]:
        identity = asdict(self.identity) | {"target_modules": list(self.identity.target_modules)}
        return {
            "format": FORMAT,
            "step": self.step,
            "attempt": self.attempt,
            "job": {"name": self.job, "uid": self.job_uid},
            "worldSize": self.world_size,
            "zeroStage": self.zero_stage,
            "precision": self.precision,
            "content": self.content,
            "baseModel": self.base_model,
            "identity": identity,
            "globalBatchSize": self.identity.global_batch_size,
            "data": {"samplesConsumed": self.samples_consumed, "seed": self.identity.seed, "sha256": self.identity.dataset},
            "optimizer": {"type": "AdamW", "step": self.optimizer_step, "lossScaler": self.loss_scaler},
            "evalLossBefore": self.eval_loss_before,
            "adapter": self.adapter,
            "shards": [shard.to_json() for shard in self.shards],
        }


def encode(manifest: Manifest) -> bytes:
    return json.dumps(manifest.to_json(), indent=1).encode()


def decode(text: bytes | str) -> Manifest:
    """Raises ValueError, in words, when it is not a whole manifest of a format we know."""
    value = json.loads(text)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ValueError(f"not a manifest of the format {FORMAT}")
    try:
        identity = Identity(**{**value["identity"], "target_modules": tuple(value["identity"]["target_modules"])})
        return Manifest(
            step=value["step"],
            attempt=value["attempt"],
            job=value["job"]["name"],
            job_uid=value["job"]["uid"],
            world_size=value["worldSize"],
            zero_stage=value["zeroStage"],
            precision=value["precision"],
            base_model=value["baseModel"],
            identity=identity,
            samples_consumed=value["data"]["samplesConsumed"],
            optimizer_step=value["optimizer"]["step"],
            eval_loss_before=value["evalLossBefore"],
            adapter=value["adapter"],
            shards=tuple(ShardRecord.from_json(shard) for shard in value["shards"]),
            content=value["content"],
            loss_scaler=value["optimizer"]["lossScaler"],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"the manifest lacks or garbles {error}") from error


def shapes(shards: Sequence[ShardRecord]) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape. Raises ValueError unless the fragments cover each element exactly once."""
    spans: dict[str, list[FragmentRecord]] = {}
    for shard in shards:
        for fragment in shard.fragments:
            spans.setdefault(fragment.name, []).append(fragment)
    result: dict[str, tuple[int, ...]] = {}
    for name, fragments in spans.items():
        end = 0
        for fragment in sorted(fragments, key=lambda item: (item.start, item.numel)):
            if fragment.start != end and fragment.numel:
                raise ValueError(f"elements of {name} are missing or doubled at {end}")
            end += fragment.numel
        total = 1
        for length in fragments[0].shape:
            total *= length
        if end != total:
            raise ValueError(f"{name} has {end} of {total} elements")
        result[name] = fragments[0].shape
    return result
