"""Decisions about the bed of hosts before it touches the machine."""

from __future__ import annotations

from contextlib import suppress
from ipaddress import ip_network
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.devcluster.host import cgroups
from lockstep.devcluster.host.layout import Layout
from lockstep.devcluster.hosts import bed
from lockstep.devcluster.hosts.bed import BedError, await_sshd
from lockstep.devcluster.hosts.layout import BedLayout
from support.clusters import bed_hosts
from unit.virtual_time import VirtualClock

NUMBERS_MAX = 9


def test_beds_and_embedded_clusters_share_no_network_and_no_name() -> None:
    beds = [BedLayout(index, Path("/cache")) for index in range(NUMBERS_MAX + 1)]
    clusters = [Layout(f"lockstep{index or ''}", index, Path("/cache")) for index in range(NUMBERS_MAX + 1)]
    networks = [ip_network(network) for each in (*beds, *clusters) for network in each.networks]
    assert not [(one, other) for one, other in combinations(networks, 2) if one.overlaps(other)]
    assert len({bed.name for bed in beds} | {each.name for each in clusters}) == len(beds) + len(clusters)
    assert all(len(bed.host(99).link) < 16 for bed in beds)  # (the kernel's limit of an interface's name)


def test_the_folder_of_control_groups_of_version_2_is_the_one_that_has_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    assert cgroups.unified() is None
    (tmp_path / "unified").mkdir()
    (tmp_path / "unified/cgroup.controllers").touch()
    assert cgroups.unified() == tmp_path / "unified"
    (tmp_path / "cgroup.controllers").touch()
    assert cgroups.unified() == tmp_path


def test_a_host_without_an_inotify_instance_is_told_apart_from_one_that_is_just_down(tmp_path: Path) -> None:
    host = BedLayout(NUMBERS_MAX, tmp_path).host(0)
    host.log.parent.mkdir(parents=True)
    host.log.write_text("Failed to allocate manager object: Too many open files\n")
    with pytest.raises(BedError, match=r"doesn't answer: it got no inotify instance .* fs.inotify.max_user_instances"):
        await_sshd(host)
    host.log.write_text("")
    with pytest.raises(BedError, match=r"doesn't answer \(see"):
        await_sshd(host)


@pytest.mark.parametrize(("after", "seconds"), [(3, 0.15), (300, 10.0)])
def test_a_host_that_is_frozen_is_looked_at_often_and_for_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, after: int, seconds: float
) -> None:
    clock, looks = VirtualClock(), [0]

    def sleep(nap: float) -> None:
        clock.now += nap
        looks[0] += 1
        (tmp_path / "cgroup.events").write_text(f"frozen {int(looks[0] >= after)}")

    (tmp_path / "cgroup.events").write_text("frozen 0")
    monkeypatch.setattr(bed_hosts, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=sleep))
    monkeypatch.setattr(bed, "group_of", lambda host: tmp_path)
    with suppress(bed.BedError):
        bed_hosts.freeze(cast(Any, SimpleNamespace(name="lab0")), frozen=True)
    assert clock.now - 1000.0 == pytest.approx(seconds, abs=0.1)
