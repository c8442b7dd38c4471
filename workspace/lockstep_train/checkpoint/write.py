"""A snapshot to a shard file."""

from __future__ import annotations

import hashlib
from pathlib import Path

from lockstep_train.checkpoint.durable import make_directory, write_durably
from lockstep_train.checkpoint.layout import shard_file
from lockstep_train.checkpoint.manifest import ShardRecord
from lockstep_train.checkpoint.snapshot import Snapshot


def write_shard(folder: Path, snapshot: Snapshot, rank: int, world_size: int) -> ShardRecord:
    """Write this rank's shard durably; the record of it goes into the manifest. Raises OSError."""
    from safetensors.torch import save

    make_directory(folder)
    content = save(snapshot.tensors)
    file = shard_file(rank, world_size)
    write_durably(folder / file, content)
    return ShardRecord(file, len(content), hashlib.sha256(content).hexdigest(), snapshot.records)
