"""A rank's state in host memory. Taking one is the only part of a save that training waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep_train.checkpoint.manifest import FragmentRecord
from lockstep_train.checkpoint.zero_access import KINDS, Fragment


@dataclass(frozen=True)
class Snapshot:
    """For each kind one flat tensor: the fragments' elements, concatenated in the order of the records."""

    records: tuple[FragmentRecord, ...]
    tensors: dict[str, torch.Tensor]


def take_snapshot(fragments: Sequence[Fragment], into: Snapshot | None = None) -> Snapshot:
    """Copy the fragments to the host. `into` is an earlier snapshot whose buffers are used again."""
    records = tuple(FragmentRecord(item.name, item.shape, item.start, item.numel) for item in fragments)
    total = sum(record.numel for record in records)
    reusable = into is not None and into.records == records
    tensors = into.tensors if into is not None and reusable else {kind: torch.empty(total) for kind in KINDS}
    offset = 0
    for fragment in fragments:
        for kind in KINDS:
            tensors[kind][offset : offset + fragment.numel].copy_(fragment.tensors[kind])
        offset += fragment.numel
    return Snapshot(records, tensors)
