"""Names inside runDir/checkpoints, and those of the tensors in a shard (pure).

step-100.a1/                             a commit of attempt 1, once manifest.json is in it
    shard-r00000-of-00002.safetensors    one a rank
    manifest.json
chain/a2.json                            the commit that attempt 2 started from
readers/step-100.a1.<random>.json        somebody reads this commit: rotation leaves it alone
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lockstep_train.zero.kinds import FULL, LITE

MANIFEST = "manifest.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter's folder, as PEFT names them."""
CHAIN = "chain"
READERS = "readers"
TRASH = ".trash-"
_COMMIT = re.compile(r"step-(\d+)\.a(\d+)")
_RECORD = re.compile(r"a(\d+)\.json")
_SHARD = re.compile(r"shard-r(\d{5,})-of-(\d{5,})\.safetensors")
_READER = re.compile(r"(step-\d+\.a\d+)\.[0-9a-f]+\.json")


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


def is_shard(name: object) -> bool:
    """A plain file name that we would have given: nothing that leads out of the folder."""
    return isinstance(name, str) and _SHARD.fullmatch(name) is not None


def parse_reader(name: str) -> CommitName | None:
    match = _READER.fullmatch(name)
    return parse_commit(match[1]) if match else None


def kinds_of(content: str) -> tuple[str, ...]:
    """The tensors of a commit whose manifest says `content`."""
    return {"Full": FULL, "Lite": LITE}[content]
