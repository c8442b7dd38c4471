"""Decisions about the bed of hosts before it touches the machine."""

from __future__ import annotations

import dataclasses
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
from lockstep.devcluster.hosts.needs import HOSTS, MachineFacts, judge
from support.clusters import bed_hosts
from unit.virtual_time import VirtualClock

NUMBERS_MAX = 9

COMMANDS = frozenset(HOSTS.packages)
READY = MachineFacts(
    system="Linux", is_root=True, distribution="debian", commands=COMMANDS, lacks=frozenset(), groups=Path("/sys/fs/cgroup/unified"),
    groups_writable=True, python="3.11", base_python="3.11", has_image=False, networks=("10.70.0.0/24",),
        routes=(("192.0.2.0/24", "eth0"),),
)  # fmt: skip


def but(**changes: Any) -> MachineFacts:
    return dataclasses.replace(READY, **changes)


def test_a_machine_that_has_everything_needs_nothing() -> None:
    assert judge(HOSTS, READY).missing == () and judge(HOSTS, READY).install == ()


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        (but(system="Darwin"), "this is Darwin; the hosts need Linux"),
        (but(is_root=False), "it needs root"),
        (but(groups=None, groups_writable=False), "control groups of version 2 are not mounted"),
        (but(groups_writable=False), "/sys/fs/cgroup/unified is read-only"),
        (but(lacks=frozenset({"namespace `cgroup`"})), "the kernel has no namespace `cgroup`"),
        (but(python="3.13"), "Lockstep runs on Python 3.13, the hosts have this distribution's 3.11"),
        (but(distribution="fedora"), "fedora is neither Debian nor Ubuntu"),
        (
            but(routes=(("10.64.0.0/10", "tun0"),)),
            "the network 10.70.0.0/24 is taken: this machine has a route to 10.64.0.0/10 through tun0",
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_is_missing_is_said_in_one_sentence(facts: MachineFacts, sentence: str) -> None:
    (missing,) = judge(HOSTS, facts).missing
    assert missing.startswith(sentence)


def test_missing_programs_are_installed_where_apt_is_and_named_elsewhere() -> None:
    lacking = but(commands=COMMANDS - {"ssh", "ssh-keygen", "debootstrap"})
    assert judge(HOSTS, lacking).install == ("debootstrap", "openssh-client")
    assert judge(HOSTS, dataclasses.replace(lacking, has_image=True)).install == ("openssh-client",)
    elsewhere = judge(HOSTS, dataclasses.replace(lacking, distribution="fedora", has_image=True))
    assert elsewhere.missing == ("install openssh-client (on Debian and Ubuntu this is done for you)",) and elsewhere.install == ()


def test_beds_and_embedded_clusters_share_no_network_and_no_name() -> None:
    beds = [BedLayout(index, Path("/cache")) for index in range(NUMBERS_MAX + 1)]
    clusters = [Layout(f"lockstep{index or ''}", index, Path("/cache")) for index in range(NUMBERS_MAX + 1)]
    of_clusters = [network for each in clusters for network in (each.node_network, each.pod_network, each.service_network)]
    networks = [ip_network(network) for network in (*(bed.network for bed in beds), *of_clusters)]
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
