"""Damage of any kind to a commit's files is noticed before anything of it is loaded."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from cases_commits import CLAIM, lone_rank, write_commit

from lockstep_train.base.errors import ConfigError
from lockstep_train.checkpoint.format.layout import shard_file
from lockstep_train.checkpoint.format.volume import Record, write_record
from lockstep_train.checkpoint.resume import choose_start

MUTATIONS = 1000
NEWEST, BEFORE = "step-4.a1", "step-2.a1"
FILES = [f"{NEWEST}/{shard_file(0, 2)}", f"{NEWEST}/{shard_file(1, 2)}", f"{NEWEST}/manifest.json", "chain/a1.json"]
Mutate = Callable[[Path, random.Random], None]


def flip_a_bit(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def cut_off(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))])


def lengthen(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randint(1, 16)))


def zero_a_block(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = draw.randrange(len(content))
    content[start : start + 64] = bytes(len(content[start : start + 64]))
    path.write_bytes(content if content != path.read_bytes() else content[:-1])


def take_another_steps(path: Path, draw: random.Random) -> None:
    other = path.parent.parent / BEFORE / path.name
    if other.exists():
        shutil.copy(other, path)
    else:
        path.write_bytes(b"{}")


def remove(path: Path, draw: random.Random) -> None:
    path.unlink()


MUTATORS: list[Mutate] = [flip_a_bit, flip_a_bit, cut_off, lengthen, zero_a_block, take_another_steps, remove]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoints = tmp_path_factory.mktemp("mutations") / "checkpoints"
    write_record(checkpoints, Record(1))
    for name in (BEFORE, NEWEST):
        write_commit(checkpoints, name)
    return checkpoints


def test_a_thousand_mutations_are_all_noticed(pristine: Path, tmp_path: Path) -> None:
    draw = random.Random(7)  # noqa: S311 (which bytes to damage)
    noticed: Counter[str] = Counter()
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(pristine, checkpoints)
    for number in range(MUTATIONS):
        file, mutate = draw.choice(FILES), draw.choice(MUTATORS)
        whole = (checkpoints / file).read_bytes()
        mutate(checkpoints / file, draw)
        said: list[str] = []
        try:
            start = choose_start(lone_rank(dist.HashStore()), checkpoints, "Auto", CLAIM, said.append)
            found = start.source.folder.name if start.source else "none"
        except ConfigError as error:
            found, said = "none", [str(error)]
        what = f"mutation {number}: {mutate.__name__} of {file}: {found}, {said}"
        if file.startswith("chain"):
            assert found == "none", what  # without its record, no commit of the attempt counts
            assert said, what
        else:
            assert found == BEFORE, what
            assert said or file.endswith("manifest.json"), what  # a manifest that is gone: then there is no such commit
        noticed[mutate.__name__] += 1
        (checkpoints / file).write_bytes(whole)
    assert sum(noticed.values()) == MUTATIONS
    assert len(noticed) == len(set(MUTATORS))
    start = choose_start(lone_rank(dist.HashStore()), checkpoints, "Auto", CLAIM, print)
    assert start.source.folder.name == NEWEST, "undamaged, the newest is chosen"
    digests = {shard.file: shard.sha256 for shard in start.source.manifest.shards}
    assert {file: hashlib.sha256((start.source.folder / file).read_bytes()).hexdigest() for file in digests} == digests
