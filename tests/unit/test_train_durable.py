"""Files written durably on a volume that several pods share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep_train.checkpoint import durable


def test_two_writers_with_the_same_process_id_do_not_take_each_other_s_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pods on one volume: both have process id 9, and both write the same record at the same time."""
    target = tmp_path / "a1.json"
    fsync = os.fsync
    second = iter([True])

    def fsync_while_the_other_writes(descriptor: int) -> None:
        fsync(descriptor)
        if next(second, False):
            durable.write_durably(target, b"other")

    monkeypatch.setattr(os, "getpid", lambda: 9)
    monkeypatch.setattr(durable.os, "fsync", fsync_while_the_other_writes)
    durable.write_durably(target, b"mine")
    assert target.read_bytes() == b"mine"
    assert [path.name for path in tmp_path.iterdir()] == ["a1.json"]
