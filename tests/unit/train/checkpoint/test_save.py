"""What a save is made of: equal shares, whole files or none."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep_spec import files
from lockstep_train.zero.kinds import FULL, LITE
from lockstep_train.zero.zero_access import Places, even_share


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 40])
def test_shares_are_equal_and_cover_every_element_once(world_size: int) -> None:
    numbers = [5, 0, 1, 12, 7]
    seen = [[0] * number for number in numbers]
    sizes = []
    for rank in range(world_size):
        size = 0
        for index, start, numel in even_share(numbers, rank, world_size):
            size += numel
            for element in range(start, start + numel):
                seen[index][element] += 1
        sizes.append(size)
    assert seen == [[1] * number for number in numbers]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("size", [0, 1, 4096, 5000, 8192])
def test_pages_are_written_up_to_the_size_of_the_file(tmp_path: Path, size: int) -> None:
    pages = mmap.mmap(-1, 8192)
    pages[:] = bytes(range(256)) * 32
    files.write_pages_durably(tmp_path / "file", memoryview(pages), size)
    assert (tmp_path / "file").read_bytes() == pages[:size]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_volume_without_direct_writes_is_written_to_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    real = os.open

    def refusing(path: str, flags: int, *mode: int) -> int:
        opened.append(flags & os.O_DIRECT)
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *mode)

    monkeypatch.setattr(files.os, "open", refusing)
    files.write_pages_durably(tmp_path / "file", memoryview(b"x" * 4096), 10)
    assert (tmp_path / "file").read_bytes() == b"x" * 10
    assert opened[0] != 0


@pytest.mark.parametrize("pages", [True, False])
def test_a_full_disk_leaves_nothing_of_the_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: bool) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "file").write_bytes(b"before")
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        if pages:
            files.write_pages_durably(tmp_path / "file", memoryview(b"x" * 4096), 4096)
        else:
            files.write_durably(tmp_path / "file", b"after")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"before"


def test_a_folder_is_made_with_its_parents_and_every_new_name_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync_directory", synced.append)
    files.make_directory(tmp_path / "run/checkpoints/step-1.a1")
    assert (tmp_path / "run/checkpoints/step-1.a1").is_dir()
    assert synced == [tmp_path, tmp_path / "run", tmp_path / "run/checkpoints"]
    files.make_directory(tmp_path / "run/checkpoints/step-1.a1")
    assert len(synced) == 3


def engine_with_state() -> Any:
    """What a save looks at of an engine under Stage3: two groups of parameters."""
    flats = [torch.zeros(4), torch.zeros(6)]
    state = {flat: {"exp_avg": torch.zeros_like(flat), "exp_avg_sq": torch.zeros_like(flat)} for flat in flats}
    return SimpleNamespace(optimizer=SimpleNamespace(fp32_partitioned_groups_flat=flats, optimizer=SimpleNamespace(state=state)))


def replace_masters(optimizer: Any) -> None:
    optimizer.fp32_partitioned_groups_flat = list(optimizer.fp32_partitioned_groups_flat)


def replace_one_master(optimizer: Any) -> None:
    optimizer.fp32_partitioned_groups_flat[1] = optimizer.fp32_partitioned_groups_flat[1].clone()


def move_one_master(optimizer: Any) -> None:
    optimizer.fp32_partitioned_groups_flat[0].data = optimizer.fp32_partitioned_groups_flat[0].clone()


def replace_the_state(optimizer: Any) -> None:
    optimizer.optimizer.state = dict(optimizer.optimizer.state)


def replace_the_state_of_one(optimizer: Any) -> None:
    flat = optimizer.fp32_partitioned_groups_flat[1]
    optimizer.optimizer.state[flat] = dict(optimizer.optimizer.state[flat])


def replace_a_moment(optimizer: Any) -> None:
    found = optimizer.optimizer.state[optimizer.fp32_partitioned_groups_flat[1]]
    found["exp_avg_sq"] = found["exp_avg_sq"].clone()


def move_a_moment(optimizer: Any) -> None:
    found = optimizer.optimizer.state[optimizer.fp32_partitioned_groups_flat[0]]
    found["exp_avg"].data = found["exp_avg"].clone()


def lose_a_moment(optimizer: Any) -> None:
    del optimizer.optimizer.state[optimizer.fp32_partitioned_groups_flat[0]]["exp_avg"]


@pytest.mark.parametrize(
    "change",
    [
        replace_masters, replace_one_master, move_one_master, replace_the_state, replace_the_state_of_one, replace_a_moment, move_a_moment,
        lose_a_moment,
    ],
)  # fmt: skip
def test_a_state_that_has_moved_in_memory_is_noticed(change: Callable[[Any], None]) -> None:
    engine = engine_with_state()
    places = Places(engine, FULL, [])
    for flat in engine.optimizer.fp32_partitioned_groups_flat:
        flat.add_(1)
    assert not places.moved(), "an update in place moves nothing"
    change(engine.optimizer)
    assert places.moved()


def test_weights_that_have_moved_are_noticed_where_a_save_reads_them() -> None:
    whole, cut = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(0))
    cut.ds_id, cut.ds_tensor = 1, torch.zeros(2)  # type: ignore[attr-defined]
    places = Places(None, LITE, [whole, cut])
    assert not places.moved()
    cut.ds_tensor = torch.zeros(2)  # type: ignore[attr-defined]
    assert places.moved()
    places = Places(None, LITE, [whole, cut])
    whole.data = torch.ones(3)
    assert places.moved()
