"""A snapshot to a shard file."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lockstep_train.checkpoint.durable import create_directories, sync_directory, write_pages_durably
from lockstep_train.checkpoint.layout import shard_file
from lockstep_train.checkpoint.manifest import ShardRecord
from lockstep_train.checkpoint.snapshot import Snapshot


def write_shard(folder: Path, snapshot: Snapshot, rank: int, world_size: int) -> ShardRecord:
    """Write this rank's shard durably; the record of it goes into the manifest. Raises OSError.

    The checksum is computed beside the writing: SHA-256 runs faster than most volumes write, and neither holds the GIL.
    The folder's own name is synced last: a journal has it since the file's sync, so that there is nothing left to wait for.
    """
    created = create_directories(folder)
    file, size = shard_file(rank, world_size), snapshot.image.size
    with ThreadPoolExecutor(1, "checksum") as beside:
        checksum = beside.submit(lambda: hashlib.sha256(snapshot.content[:size]).hexdigest())
        write_pages_durably(folder / file, snapshot.content, size)
        for path in created:
            sync_directory(path.parent)
        return ShardRecord(file, size, checksum.result(), snapshot.image.records)
