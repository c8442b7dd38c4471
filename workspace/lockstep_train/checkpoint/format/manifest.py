"""The manifest: what a commit holds and what it was trained from. Its presence is the commit.

It is sealed, as all JSON files of the format are: the last line is the SHA-256 of every byte before it, which tells whether the file is
whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from lockstep_spec.choices import Batches
from lockstep_spec.codec import Must, at_least, from_json, to_json
from lockstep_train.checkpoint.format.identity import Identity
from lockstep_train.checkpoint.format.layout import is_shard

FORMAT = "lockstep-checkpoint/1"

Count = Annotated[int, at_least(0)]


class FragmentRecord(NamedTuple):
    """Elements [start, start + numel) of the flattened parameter `name`. The file has it as a list: a large model has very many."""

    name: str
    shape: tuple[Count, ...]
    start: Count
    numel: Count


@dataclass(frozen=True)
class ShardRecord:
    """One rank's file: each tensor in it is the concatenation of the fragments in order."""

    file: Annotated[str, Must("the name of a shard", is_shard)]
    bytes: Count
    sha256: str
    fragments: tuple[FragmentRecord, ...]
    nodes: tuple[Count, ...] = ()
    """Nodes on whose volumes the file was durable at the commit, the one that wrote it first."""


@dataclass(frozen=True)
class Manifest:
    step: Count
    attempt: Count
    job: str
    job_uid: str | None
    world_size: Count
    zero_stage: str
    precision: str
    base_model: str
    identity: Identity
    samples_consumed: Count
    """The data cursor."""
    optimizer_step: Count
    eval_loss_before: str | None
    """Loss before the first step of the whole run, so that the end can tell what was gained."""
    adapter: dict[str, Any]
    """`config`: adapter_config.json; `names`: parameter → tensor of the adapter file."""
    shards: tuple[ShardRecord, ...]
    content: Annotated[str, Must("Full or Lite", lambda content: content in {"Full", "Lite"})] = "Full"
    """`Full`: the shards hold masters and moments; `Lite`: the trained weights alone (format/layout.py has the tensors' names)."""
    optimizer_settings: Mapping[str, float] = field(default_factory=dict)
    """Path below `training` → value, to tell what a later attempt has otherwise. Empty in commits from before they were recorded."""
    loss_scaler: dict[str, Any] | None = None
    """FP16 only: what the dynamic loss scaler knows."""
    eval_loss: float | None = None
    """The last finite evaluation before the commit, and the step it was made at; the best commit is kept by it."""
    eval_step: int | None = None
    batches: Batches = Batches.ROWS
    """Division of the run's steps. Commits from before it was recorded were trained by rows."""
    base_origin: dict[str, Any] | None = None
    """Origin of a base model that was fetched: `name`, `revision` as the job has it, and `pin`, the commit that it is."""


_GROUPED = {
    "job": ("job", "name"),
    "jobUid": ("job", "uid"),
    "samplesConsumed": ("data", "samplesConsumed"),
    "optimizerSettings": ("optimizer", "settings"),
    "optimizerStep": ("optimizer", "step"),
    "lossScaler": ("optimizer", "lossScaler"),
}
"""Key of a field → group of the file that it stands in, and its key there."""


def document(manifest: Manifest) -> dict[str, Any]:
    """Return the manifest as JSON. What of the identity people look for first stands outside of it, too."""
    flat = to_json(manifest)
    grouped: dict[str, dict[str, Any]] = {
        "job": {},
        "data": {"seed": manifest.identity.seed, "sha256": manifest.identity.dataset},
        "optimizer": {},
    }
    for key, (group, inner) in _GROUPED.items():
        grouped[group][inner] = flat.pop(key)
    return {"format": FORMAT, "globalBatchSize": manifest.identity.global_batch_size, **grouped, **flat}


def encode(manifest: Manifest) -> bytes:
    return seal(document(manifest))


def decode(text: bytes | str) -> Manifest:
    """Raise ValueError, in words, when it is not a whole manifest of a format we know.

    A checksum says that nothing was damaged, not that it makes sense: no number may be negative, no path may lead out.
    """
    value = unseal(text)
    if value.get("format") != FORMAT:
        raise ValueError(f"not a manifest of the format {FORMAT}")
    groups = {name: value.pop(name, None) for name in ("job", "data", "optimizer")}
    for key, (name, inner) in _GROUPED.items():
        group = groups[name]
        if isinstance(group, dict) and inner in group:
            value[key] = group[inner]
    manifest = from_json(Manifest, value, "manifest")
    if not isinstance(manifest.adapter.get("names"), dict):
        raise ValueError("manifest.adapter.names is missing, or no object")
    files = {shard.file for shard in manifest.shards}
    if len(files) != manifest.world_size or len(manifest.shards) != manifest.world_size:
        raise ValueError(f"{len(manifest.shards)} shards are not those of {manifest.world_size} ranks")
    return manifest


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


_LINE = ',\n "sha256": "'
_END = '"\n}'


def seal(body: Mapping[str, Any]) -> bytes:
    """A line for each key of the object, and no more: what indents JSON is written in Python, and slow where there are many fragments."""
    head = "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in body.items())
    return f"{head}{_LINE}{_digest(head)}{_END}".encode()


def unseal(content: bytes | str) -> dict[str, Any]:
    """The object that was sealed. Raises ValueError when a single bit is another one."""
    text = content if isinstance(content, str) else content.decode()
    head, line, tail = text.rpartition(_LINE)
    if not line:
        raise ValueError("it is torn: the checksum that ends it is missing")
    if tail != f"{_digest(head)}{_END}":
        raise ValueError("it is damaged: its content does not have its checksum")
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    del value["sha256"]
    return value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
