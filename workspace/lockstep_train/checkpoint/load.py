"""The state in a commit, as whole parameters, wherever its shards are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep_train.checkpoint.manifest import Manifest, shapes
from lockstep_train.engine.ranks import Ranks


class ShardReader:
    """Reads parameters from the shards that are on this node's volume."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.shapes = shapes(manifest.shards)
        self._folder = folder
        self._spans: dict[str, list[tuple[int, int, int, int]]] = {}  # name → (shard, offset in it, start, numel)
        for index, shard in enumerate(manifest.shards):
            offset = 0
            for item in shard.fragments:
                self._spans.setdefault(item.name, []).append((index, offset, item.start, item.numel))
                offset += item.numel
        self._files = [shard.file for shard in manifest.shards]
        self._open: dict[int, dict[str, torch.Tensor]] = {}

    def read(self, name: str, kind: str, only: Callable[[int], bool] = lambda shard: True) -> torch.Tensor:
        """A flattened parameter in FP32, zero where `only` excludes the shard."""
        whole = torch.zeros(torch.Size(self.shapes[name]).numel())
        for shard, offset, start, numel in self._spans[name]:
            if numel and only(shard):
                whole[start : start + numel] = self._shard(shard)[kind][offset : offset + numel]
        return whole

    def _shard(self, index: int) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        if index not in self._open:
            self._open[index] = load_file(self._folder / self._files[index])  # memory-mapped: only what is used is read
        return self._open[index]


def direct(reader: ShardReader) -> Callable[[str, str], torch.Tensor]:
    """For a volume that has every shard: no communication."""
    return reader.read


def exchanged(reader: ShardReader, holders: list[int], ranks: Ranks) -> Callable[[str, str], torch.Tensor]:
    """For volumes that have only some shards each: `holders[shard]` contributes it, and all ranks get the sum.

    A collective. Summed as integers, because adding 0.0 would turn -0.0 into 0.0 and the state must stay bitwise.
    """

    def full(name: str, kind: str) -> torch.Tensor:
        mine = reader.read(name, kind, only=lambda shard: holders[shard] == ranks.rank)
        bits = mine.view(torch.int32).to(ranks.device)
        dist.all_reduce(bits)
        return bits.view(torch.float32)

    return full
