"""Files written durably on a volume that several pods share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep_spec import files


def test_what_is_written_is_for_the_group_too_where_the_umask_lets_it(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        files.make_directory(tmp_path / "a" / "b")
        files.write_durably(tmp_path / "a" / "b" / "record", b"x")
        files.write_pages_durably(tmp_path / "a" / "b" / "shard", memoryview(bytearray(4096)), 10)
    finally:
        os.umask(before)
    found = [(path.name, oct(path.stat().st_mode & 0o777)) for path in sorted((tmp_path / "a").rglob("*"))]
    assert found == [("b", "0o775"), ("record", "0o664"), ("shard", "0o664")]


def test_two_writers_with_the_same_process_id_do_not_take_each_other_s_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pods on one volume: both have process id 9, and both write the same record at the same time."""
    target = tmp_path / "a1.json"
    fsync = os.fsync
    second = iter([True])

    def fsync_while_the_other_writes(descriptor: int) -> None:
        fsync(descriptor)
        if next(second, False):
            files.write_durably(target, b"other")

    monkeypatch.setattr(os, "getpid", lambda: 9)
    monkeypatch.setattr(files.os, "fsync", fsync_while_the_other_writes)
    files.write_durably(target, b"mine")
    assert target.read_bytes() == b"mine"
    assert [path.name for path in tmp_path.iterdir()] == ["a1.json"]


def test_pages_are_written_eight_mebibytes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(os, "write", lambda _, data: sizes.append(len(data)) or len(data))
    files.write_pages_durably(tmp_path / "shard", memoryview(bytearray(20 << 20)), 20 << 20)
    assert sizes == [8 << 20, 8 << 20, 4 << 20]
