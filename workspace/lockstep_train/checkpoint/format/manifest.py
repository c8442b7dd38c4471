"""The manifest: what a commit holds and what it was trained from. Its presence is the commit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep_train.checkpoint.format.identity import Identity
from lockstep_train.checkpoint.format.layout import is_shard
from lockstep_train.checkpoint.format.seal import seal, unseal

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
    nodes: tuple[int, ...] = ()
    """Nodes on whose volumes the file was durable at the commit, the one that wrote it first."""

    def to_json(self) -> dict[str, Any]:
        fragments = [[item.name, list(item.shape), item.start, item.numel] for item in self.fragments]
        return {"file": self.file, "bytes": self.bytes, "sha256": self.sha256, "nodes": list(self.nodes), "fragments": fragments}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> ShardRecord:
        fragments = tuple(FragmentRecord(name, tuple(shape), start, numel) for name, shape, start, numel in value["fragments"])
        return ShardRecord(value["file"], value["bytes"], value["sha256"], fragments, tuple(value["nodes"]))


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
    """`Full`: the shards hold masters and moments; `Lite`: the trained weights alone (format/kinds.py has the tensors' names)."""
    optimizer: str = "AdamW"
    optimizer_settings: Mapping[str, float] = field(default_factory=dict)
    """Path below `training` → value, to tell what a later attempt has otherwise. Empty in commits from before they were recorded."""
    loss_scaler: dict[str, Any] | None = None
    """FP16 only: what the dynamic loss scaler knows."""
    eval_loss: float | None = None
    """The last finite evaluation before the commit, and the step it was made at; the best commit is kept by it."""
    eval_step: int | None = None
    base_origin: dict[str, Any] | None = None
    """Of a base model that was fetched: `name`, `revision` as the job has it, and `pin`, the commit that it is."""

    def to_json(self) -> dict[str, Any]:
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
            "baseOrigin": self.base_origin,
            "identity": self.identity.to_json(),
            "globalBatchSize": self.identity.global_batch_size,
            "data": {"samplesConsumed": self.samples_consumed, "seed": self.identity.seed, "sha256": self.identity.dataset},
            "optimizer": {
                "type": self.optimizer,
                "settings": dict(self.optimizer_settings),
                "step": self.optimizer_step,
                "lossScaler": self.loss_scaler,
            },
            "evalLoss": self.eval_loss,
            "evalStep": self.eval_step,
            "evalLossBefore": self.eval_loss_before,
            "adapter": self.adapter,
            "shards": [shard.to_json() for shard in self.shards],
        }


def encode(manifest: Manifest) -> bytes:
    return seal(manifest.to_json())


def decode(text: bytes | str) -> Manifest:
    """Raise ValueError, in words, when it is not a whole manifest of a format we know."""
    value = unseal(text)
    if value.get("format") != FORMAT:
        raise ValueError(f"not a manifest of the format {FORMAT}")
    try:
        manifest = Manifest(
            step=value["step"],
            attempt=value["attempt"],
            job=value["job"]["name"],
            job_uid=value["job"]["uid"],
            world_size=value["worldSize"],
            zero_stage=value["zeroStage"],
            precision=value["precision"],
            base_model=value["baseModel"],
            identity=Identity.from_json(value["identity"]),
            samples_consumed=value["data"]["samplesConsumed"],
            optimizer_step=value["optimizer"]["step"],
            eval_loss_before=value["evalLossBefore"],
            adapter=value["adapter"],
            shards=tuple(ShardRecord.from_json(shard) for shard in value["shards"]),
            content=value["content"],
            optimizer=value["optimizer"]["type"],
            optimizer_settings=dict(value["optimizer"].get("settings", {})),
            loss_scaler=value["optimizer"]["lossScaler"],
            eval_loss=value["evalLoss"],
            eval_step=value["evalStep"],
            base_origin=value.get("baseOrigin"),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the manifest lacks or garbles {error}") from error
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    """A checksum says that nothing was damaged, not that it makes sense: no number may be negative, no path may lead out."""
    for name, value in _counts(manifest):
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} is {value!r}, not a whole number ≥ 0")
    for name, value, kinds in _typed(manifest):
        if not isinstance(value, kinds):
            raise ValueError(f"{name} is {value!r}, which it can't be")
    if manifest.content not in {"Full", "Lite"}:
        raise ValueError(f"content is {manifest.content!r}, not Full or Lite")
    files = {shard.file for shard in manifest.shards}
    stranger = next((file for file in files if not is_shard(file)), None)
    if stranger is not None:
        raise ValueError(f"{stranger!r} is not the name of a shard")
    if len(files) != manifest.world_size or len(manifest.shards) != manifest.world_size:
        raise ValueError(f"{len(manifest.shards)} shards are not those of {manifest.world_size} ranks")


def _counts(manifest: Manifest) -> Iterator[tuple[str, object]]:
    yield from (("step", manifest.step), ("attempt", manifest.attempt), ("worldSize", manifest.world_size))
    yield from (("optimizer.step", manifest.optimizer_step), ("data.samplesConsumed", manifest.samples_consumed))
    yield "globalBatchSize", manifest.identity.global_batch_size
    for shard in manifest.shards:
        yield f"{shard.file}: bytes", shard.bytes
        yield from ((f"{shard.file}: nodes", node) for node in shard.nodes)
        for item in shard.fragments:
            yield from ((f"{shard.file}: {item.name}", value) for value in (item.start, item.numel, *item.shape))


def _typed(manifest: Manifest) -> Iterator[tuple[str, object, type | tuple[type, ...]]]:
    yield from (("content", manifest.content, str), ("precision", manifest.precision, str), ("zeroStage", manifest.zero_stage, str))
    yield "optimizer.type", manifest.optimizer, str
    yield from ((name, value, (int, float)) for name, value in manifest.optimizer_settings.items())
    yield "evalLoss", manifest.eval_loss, (int, float, type(None))
    yield "evalStep", manifest.eval_step, (int, type(None))
    yield "adapter", manifest.adapter, dict
    for path, digest in (*manifest.identity.base_files.items(), *manifest.identity.data_files.items()):
        yield f"identity: {path}", digest, str
    yield "adapter.names", manifest.adapter.get("names"), dict
    for shard in manifest.shards:
        yield from (("file", shard.file, str), (f"{shard.file}: sha256", shard.sha256, str))
        yield from ((f"{shard.file}: name", item.name, str) for item in shard.fragments)


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
