"""Names inside runDir/checkpoints (pure).

step-100.a1/                             a commit of attempt 1, once manifest.json is in it
    shard-r00000-of-00002.safetensors    one a rank
    manifest.json
chain/a2.json                            the commit that attempt 2 started from
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MANIFEST = "manifest.json"
CHAIN = "chain"
_COMMIT = re.compile(r"step-(\d+)\.a(\d+)")
_RECORD = re.compile(r"a(\d+)\.json")


@dataclass(frozen=True, order=True)
class CommitName:
    """A commit's folder: the optimizer steps done, and the attempt that wrote it."""

    attempt: int
    step: int

    def __str__(self) -> str:
        return f"step-{self.step}.a{self.attempt}"


def parse_commit(name: str) -> CommitName | None:
    match = _COMMIT.fullmatch(name)
    return CommitName(attempt=int(match[2]), step=int(match[1])) if match else None


def record_file(attempt: int) -> str:
    return f"a{attempt}.json"


def parse_record(name: str) -> int | None:
    match = _RECORD.fullmatch(name)
    return int(match[1]) if match else None


def shard_file(rank: int, world_size: int) -> str:
    return f"shard-r{rank:05d}-of-{world_size:05d}.safetensors"
