"""Marks by which hosts that share a folder are found out: here, programs of this machine stand for the hosts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lockstep.api.hosts import Host, HostsCluster
from lockstep.plan.hosts.volumes import Sharing
from lockstep.platforms.hosts import volumes
from lockstep.platforms.hosts.fleet import Fleet
from lockstep.platforms.onhost.marks import MARK
from support.process_place import ProcessPlace


class Here(Fleet):
    """Hosts whose programs run on this machine."""

    def place(self, host: str) -> Any:
        return ProcessPlace(f"host {host}")


@pytest.fixture
def fleet() -> Fleet:
    return Here(HostsCluster(hosts=[Host(name=name) for name in ("lab0", "lab1", "lab2")], ports="29400-29449"), "lab", "lab")


def marks_in(folder: Path) -> list[Path]:
    return list(folder.glob(f"{MARK}*"))


def test_folders_that_are_made_meanwhile_do_not_part_hosts_that_share_one(fleet: Fleet, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    shared = tmp_path / "disk" / "workspace"
    shared.parent.mkdir()

    async def asked() -> Sharing:
        folders = {"lab0": str(shared), "lab1": str(own), "lab2": str(shared)}
        async with volumes.looking_for_marks(fleet, folders) as sharing:
            assert (len(marks_in(shared.parent)), len(marks_in(own))) == (2, 1), "each host has written its mark"
            shared.mkdir()
            return await sharing

    assert asyncio.run(asked()).groups == [["lab0", "lab2"], ["lab1"]]
    assert marks_in(shared.parent) == marks_in(own) == [], "all marks are gone"


def test_a_block_that_ends_before_the_hosts_have_looked_leaves_no_mark(fleet: Fleet, tmp_path: Path) -> None:
    folders = {host: tmp_path / host for host in ("lab0", "lab1")}
    for folder in folders.values():
        folder.mkdir()

    async def refused() -> None:
        async with volumes.looking_for_marks(fleet, {host: str(folder) for host, folder in folders.items()}, stated=True):
            raise ValueError("some other host has not taken its files")

    with pytest.raises(ValueError, match="not taken"):
        asyncio.run(refused())
    assert [marks_in(folder) for folder in folders.values()] == [[], []]


def test_one_host_is_asked_nothing(tmp_path: Path) -> None:
    fleet = Fleet(HostsCluster(hosts=[Host(name="lab0")], ports="29400-29449"), "lab", "lab")
    assert asyncio.run(volumes.sharing(fleet, {"lab0": str(tmp_path)}, stated=True)) == Sharing([["lab0"]])
