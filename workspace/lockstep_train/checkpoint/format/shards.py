"""Ranges of parameters that each rank needs, read from a commit's shards wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep_train.base.ranks import Ranks
from lockstep_train.checkpoint.format.manifest import Manifest, shapes
from lockstep_train.zero.kinds import MASTER, MOMENTS, WEIGHTS
from lockstep_train.zero.zero_access import RangeNeed, Values


@dataclass(frozen=True)
class Span:
    """Elements [start, start + numel) of a parameter, at `offset` in each tensor of a shard."""

    shard: int
    offset: int
    start: int
    numel: int

    def overlap(self, start: int, numel: int) -> tuple[int, int]:
        """Start and length of what [start, start + numel) shares with this span; the length is ≤ 0 for nothing."""
        first = max(start, self.start)
        return first, min(start + numel, self.start + self.numel) - first


class ShardReader:
    """Reader of ranges of parameters from the shards in one folder; of a file only what is asked for."""

    def __init__(self, folder: Path, manifest: Manifest, paths: Sequence[Path] | None = None) -> None:
        """`paths`: where each shard is, if they are not all in `folder`."""
        self.shapes = shapes(manifest.shards)
        self.lite = manifest.content == "Lite"
        self._files = list(paths) if paths is not None else [folder / shard.file for shard in manifest.shards]
        self._spans: dict[str, list[Span]] = {}
        self._open: dict[int, Any] = {}
        for index, shard in enumerate(manifest.shards):
            offset = 0
            for item in shard.fragments:
                if item.numel:
                    self._spans.setdefault(item.name, []).append(Span(index, offset, item.start, item.numel))
                offset += item.numel

    def numel(self, name: str) -> int:
        return torch.Size(self.shapes[name]).numel()

    def spans(self, name: str) -> list[Span]:
        return self._spans.get(name, [])

    def ranges(self, name: str, need: RangeNeed) -> dict[str, tuple[int, int]]:
        """Kind → start and length. A `Lite` commit has no moments."""
        masters = (0, self.numel(name)) if need.whole else (need.start, need.numel)
        return {MASTER: masters} | ({} if self.lite else dict.fromkeys(MOMENTS, (need.start, need.numel)))

    def read(self, name: str, kind: str, start: int = 0, numel: int | None = None) -> torch.Tensor:
        """Read elements [start, start + numel) of a flattened parameter, or all, in FP32, from shards that are all here."""
        values = torch.empty(self.numel(name) if numel is None else numel)
        for span in self.spans(name):
            first, count = span.overlap(start, values.numel())
            if count > 0:
                values[first - start : first - start + count] = self.part(span, kind, first, count)
        return values

    def part(self, span: Span, kind: str, start: int, numel: int) -> torch.Tensor:
        """Elements [start, start + numel) of the parameter, which lie in this span, in FP32."""
        offset = span.offset + start - span.start
        stored = WEIGHTS if self.lite and kind == MASTER else kind
        part: torch.Tensor = self._shard(span.shard).get_slice(stored)[offset : offset + numel]
        if part.numel() != numel:
            raise ValueError(f"{self._files[span.shard]} has fewer elements than its manifest says")
        return part.float()

    def _shard(self, index: int) -> Any:
        from safetensors import safe_open

        if index not in self._open:
            self._open[index] = safe_open(str(self._files[index]), framework="pt")
        return self._open[index]


def local_fetch(reader: ShardReader) -> Callable[[str, RangeNeed], Values]:
    """Return a reader for a volume that has every shard: no communication, and no byte is read that isn't needed."""
    return lambda name, need: {kind: reader.read(name, kind, *part) for kind, part in reader.ranges(name, need).items()}


@dataclass(frozen=True)
class ShardPiece:
    """Elements [start, start + numel) of one kind, which `sender` reads for `receiver`."""

    sender: int
    receiver: int
    kind: str
    start: int
    numel: int
    span: Span


def planned_pieces(
    reader: ShardReader, name: str, needs: Sequence[Mapping[str, RangeNeed]], sender: Callable[[int, int], int]
) -> Iterator[ShardPiece]:
    """Plan who reads what for whom, of one parameter: the same on every rank. `sender(shard, receiver)` is a rank."""
    for receiver, mine in enumerate(needs):
        for kind, (start, numel) in reader.ranges(name, mine[name]).items() if name in mine else ():
            for span in reader.spans(name):
                first, count = span.overlap(start, numel)
                if count > 0:
                    yield ShardPiece(sender(span.shard, receiver), receiver, kind, first, count, span)


def nearest_holder(holders: Sequence[Sequence[int]], nodes: Sequence[int]) -> Callable[[int, int], int]:
    """The rank that reads a shard for another: itself where its node's volume has the shard, else the holders in turn.

    `holders[shard]` are ranks, one a node that has it; `nodes[rank]` is the rank's node.
    """

    def sender(shard: int, receiver: int) -> int:
        near = any(nodes[rank] == nodes[receiver] for rank in holders[shard])
        return receiver if near else holders[shard][receiver % len(holders[shard])]

    return sender


def exchanging_fetch(
    reader: ShardReader, holders: Sequence[Sequence[int]], nodes: Sequence[int], mine: Mapping[str, RangeNeed], ranks: Ranks
) -> Callable[[str, RangeNeed], Values]:
    """Return a reader for volumes that have only some shards each: what a node lacks travels from the ranks that hold it, to whom it is
    needed, one parameter at a time. A collective: every rank asks for the same parameters in the same order."""
    needs = _all_needs(ranks, mine)
    sender = nearest_holder(holders, nodes)

    def fetch(name: str, need: RangeNeed) -> Values:
        plan = list(planned_pieces(reader, name, needs, sender))
        result = {kind: torch.empty(numel) for kind, (_, numel) in reader.ranges(name, need).items()}
        starts = {kind: start for kind, (start, _) in reader.ranges(name, need).items()}
        local = [piece for piece in plan if piece.sender == piece.receiver == ranks.rank]
        for piece in local:
            _place(result, starts, piece, reader.part(piece.span, piece.kind, piece.start, piece.numel))
        traveling = [piece for piece in plan if piece.sender != piece.receiver]
        if traveling:
            for piece, values in _travel(reader, traveling, ranks):
                _place(result, starts, piece, values)
        return result

    return fetch


def _place(result: Values, starts: Mapping[str, int], piece: ShardPiece, values: torch.Tensor) -> None:
    begin = piece.start - starts[piece.kind]
    result[piece.kind][begin : begin + piece.numel] = values


def _travel(reader: ShardReader, traveling: Sequence[ShardPiece], ranks: Ranks) -> list[tuple[ShardPiece, torch.Tensor]]:
    """Exchange pieces in one all-to-all. Both sides derive the order from the same plan, so nothing but elements is sent."""
    outgoing = [[piece for piece in traveling if piece.sender == ranks.rank and piece.receiver == rank] for rank in range(ranks.world_size)]
    incoming = [[piece for piece in traveling if piece.receiver == ranks.rank and piece.sender == rank] for rank in range(ranks.world_size)]
    read = [reader.part(piece.span, piece.kind, piece.start, piece.numel) for group in outgoing for piece in group]
    sent = torch.cat(read).to(ranks.device) if read else torch.empty(0, device=ranks.device)
    sizes_out = [sum(piece.numel for piece in group) for group in outgoing]
    sizes_in = [sum(piece.numel for piece in group) for group in incoming]
    received = torch.empty(sum(sizes_in), device=ranks.device)
    dist.all_to_all_single(received, sent, sizes_in, sizes_out)
    flat = [piece for group in incoming for piece in group]
    parts = torch.split(received.cpu(), [piece.numel for piece in flat]) if flat else ()
    return list(zip(flat, parts, strict=True))


def _all_needs(ranks: Ranks, mine: Mapping[str, RangeNeed]) -> list[dict[str, RangeNeed]]:
    """Every rank's needs, on every rank."""
    value = {name: [need.start, need.numel, need.whole] for name, need in mine.items()}
    gathered = ranks.publish("load/all-needs", ranks.gather("load/needs", value))
    return [{name: RangeNeed(start, numel, bool(whole)) for name, (start, numel, whole) in item.items()} for item in gathered]
