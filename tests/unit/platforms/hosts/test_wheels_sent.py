"""Files that `hosts setup` sends: as `lockstep cp` sends them, by a text that the oldest Python reads."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.api.errors import Failed
from lockstep.api.hosts import Host
from lockstep.platforms.hosts import environment
from lockstep.platforms.hosts.wheelhouse import WheelFile
from lockstep.platforms.inpod.carry import draft_name
from support.process_place import ProcessPlace


@pytest.fixture
def files(tmp_path: Path) -> list[WheelFile]:
    (tmp_path / "house").mkdir()
    contents = {"small-1.0.whl": b"small" * 10, "large-1.0.whl": b"large" * (1 << 20)}
    for name, content in contents.items():
        (tmp_path / "house" / name).write_bytes(content)
    return [WheelFile(tmp_path / "house" / name, hashlib.sha256(content).hexdigest()) for name, content in contents.items()]


def send(data: Path, files: list[WheelFile], there: Mapping[str, int]) -> list[str]:
    """Send the files to a host whose folder is `data`; return what is said."""
    said: list[str] = []
    setup = SimpleNamespace(host=Host(name="lab0"), parts=SimpleNamespace(data=str(data), files=there))
    place = cast(Any, ProcessPlace("host lab0", python=(sys.executable,)))
    asyncio.run(environment._send(place, cast(Any, setup), files, said.append))
    return said


def test_what_a_host_lacks_comes_whole_under_its_name(tmp_path: Path, files: list[WheelFile]) -> None:
    assert send(tmp_path / "data", files, {"small-1.0.whl": 50}) == ["lab0: sending 1 file, 5 MB"]
    assert [path.name for path in (tmp_path / "data" / "wheels").iterdir()] == ["large-1.0.whl"]
    assert (tmp_path / "data/wheels/large-1.0.whl").read_bytes() == files[1].path.read_bytes()


def test_nothing_is_begun_where_all_is_there(tmp_path: Path, files: list[WheelFile]) -> None:
    assert send(tmp_path / "data", files, {file.path.name: file.size for file in files}) == []
    assert not (tmp_path / "data").exists()


def test_a_file_that_came_in_part_goes_on_and_what_others_wrote_is_replaced(tmp_path: Path, files: list[WheelFile]) -> None:
    wheels = tmp_path / "data" / "wheels"
    wheels.mkdir(parents=True)
    (wheels / draft_name("large-1.0.whl")).write_bytes(files[1].path.read_bytes()[: 1 << 20])
    (wheels / "small-1.0.whl").write_text("other")
    send(tmp_path / "data", files, {"small-1.0.whl": 5})
    assert {path.name: path.read_bytes() for path in wheels.iterdir()} == {file.path.name: file.path.read_bytes() for file in files}


def test_why_a_host_takes_nothing_is_told_with_its_name(tmp_path: Path, files: list[WheelFile]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "wheels").write_text("a file where a folder must be")
    with pytest.raises(Failed, match=r"^host lab0: \S+/data/wheels is a link or a file where a folder has to be"):
        send(tmp_path / "data", files, {})
