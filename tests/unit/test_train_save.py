"""What a save is made of: equal shares, whole files or none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep_train.checkpoint import durable
from lockstep_train.checkpoint.share import even_share


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
    import mmap

    pages = mmap.mmap(-1, 8192)
    pages[:] = bytes(range(256)) * 32
    durable.write_pages_durably(tmp_path / "file", memoryview(pages), size)
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

    monkeypatch.setattr(durable.os, "open", refusing)
    durable.write_pages_durably(tmp_path / "file", memoryview(b"x" * 4096), 10)
    assert (tmp_path / "file").read_bytes() == b"x" * 10
    assert opened[0] != 0


@pytest.mark.parametrize("pages", [True, False])
def test_a_full_disk_leaves_nothing_of_the_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: bool) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "file").write_bytes(b"before")
    monkeypatch.setattr(durable.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        if pages:
            durable.write_pages_durably(tmp_path / "file", memoryview(b"x" * 4096), 4096)
        else:
            durable.write_durably(tmp_path / "file", b"after")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"before"
