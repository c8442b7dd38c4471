"""Judgments of `doctor`: each fault is named with its host or pair and a fix; a healthy host has none."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from lockstep.api.cluster import TrainingClusterSpec
from lockstep.api.errors import ConfigError
from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.plan.cluster.finding import Finding, Outcome
from lockstep.plan.cluster.hardware import RailEnd
from lockstep.plan.cluster.pairs import Pair, PairRate
from lockstep.plan.discovery.rails import unused
from lockstep.plan.hosts.check import host_findings, hosts_hardware
from lockstep.plan.hosts.condition import GpuError, HostCondition, HostLook, Knock, Libraries, Torch, read_condition
from lockstep.plan.hosts.facts import BadAnswer, Folder, HostFacts, HostGpu, Link, Route
from lockstep.plan.hosts.fit import as_check
from lockstep.plan.hosts.keys import fingerprint, read_fingerprints, with_host_keys
from lockstep.plan.hosts.reach import HostNetwork, network_findings, ring

LAB = """\
cluster: {name: lab, platform: hosts}
defaults: {python: /opt/env/bin/python}
hosts:
  - name: lab0   # stays on
    address: 10.0.0.1
  - {name: lab1, address: 10.0.0.2}  # the laptop
"""
CLUSTER = parse_cluster_file(LAB, "lab.yaml").hosts
GPU = HostGpu(0, "GPU-0", "RTX 4090", 24 << 30, driver="550.54", capability=(8, 9))
WELL = HostCondition(open_files=1 << 20, shm=8 << 30, libraries=Libraries("3.12.3", {"torch": "2.6.0"}))


def look(number: int, condition: dict[str, Any] | None = None, seen: dict[str, Any] | None = None, **facts: Any) -> HostLook:
    host = CLUSTER.hosts[number]
    answer = HostFacts(
        host.name, "ada", "/home/ada", 0.0, (3, 12), Folder("/home/ada/w", 1 << 40), Folder("/home/ada/d", 1 << 40),
        routes={"10.0.0.9": Route(str(host.address), "eth0")}, links={"eth0": Link()},
        has_units=True, lingers=True, own_name="10.0.0.1",
    )  # fmt: skip
    return replace(HostLook(host, replace(answer, **facts), replace(WELL, **(condition or {})), seconds=0.05), **(seen or {}))


def judged(*looks: HostLook) -> list[tuple[str, str, str, str]]:
    addresses = {host.name: str(host.address) for host in CLUSTER.hosts}
    return [(one.outcome.value, one.subject, one.message, one.fix) for one in host_findings(looks, CLUSTER, "lab", addresses)]


def test_healthy_hosts_have_no_finding() -> None:
    assert judged(look(0), look(1)) == []
    assert judged(look(0, gpus=(GPU,), condition={"torch": Torch("12.4", ("sm_80", "sm_90"))})) == []


@pytest.mark.parametrize(
    ("change", "outcome", "words", "fix"),
    [
        ({"seen": {"noise": "Welcome\n"}}, "warning", "prints 'Welcome'", "print nothing"),
        ({"seen": {"noise": "Welcome " * 30}}, "warning", f"prints {'Welcome ' * 5!r} before", "print nothing"),
        ({"seen": {"seconds": 9.0}}, "warning", "only after 9.0 s", "UseDNS"),
        ({"seen": {"clock_seconds": -5.0}}, "warning", "5 s behind this machine's", "as root on lab1: timedatectl set-ntp true"),
        ({"python": (3, 9)}, "failed", "Python 3.9 is too old", "lockstep hosts setup lab"),
        ({"stated_python": (3, 9)}, "failed", "/env/bin/python is Python 3.9, and 3.10 or newer is needed",
            "lockstep hosts setup lab makes"),
        ({"stated_problem": "Permission denied"}, "failed", "/env/bin/python can't be run: Permission denied", "state another one"),
        ({"system": "Darwin"}, "failed", "runs Darwin", "leave it out"),
        ({"condition": {"libraries": Libraries(problem="can't be run")}}, "failed", "can't be run", "hosts[].python"),
        ({"workspace": Folder("/w", 1 << 40, problem="/w is on a read-only file system")}, "failed", "read-only", "hosts[].workspace"),
        ({"workspace": Folder("/w", 5 << 20)}, "failed", "its workspace /w has 5.2 MB free", "another disk"),
        ({"workspace": Folder("/w", 5 << 30)}, "warning", "its workspace /w has 5.4 GB free", "-f job.yaml"),
        ({"condition": {"nvidia_cards": 1}}, "failed", "nvidia-smi shows none", "as root on lab1: install NVIDIA's driver"),
        ({"gpu_problem": "nvidia-smi ends with 15: lost"}, "warning", "not all known: nvidia-smi ends with 15: lost", "nvidia-smi on lab1"),
        ({"gpu_problem": "nvidia-smi ends with 15: lost", "condition": {"nvidia_cards": 1}}, "failed", "not all known: nvidia-smi ends",
            "nvidia-smi on lab1"),
        ({"condition": {"gpu_errors": (GpuError("0000:01:00", 79, "NVRM: Xid"),)}}, "warning", "Xid 79", "power, heat"),
        ({"links": {"eth0": Link(wireless=True)}}, "warning", "eth0 is wireless", "cable"),
        ({"links": {"eth0": Link(up=False)}}, "failed", "eth0 is down", "ip link set eth0 up"),
        ({"lingers": False}, "warning", "does not come back after a reboot", "loginctl enable-linger ada"),
        ({"lingers": False, "kills_processes": True}, "failed", "ends all that ada runs at the end of", "loginctl enable-linger ada"),
        ({"has_units": False}, "warning", "since there is no systemd for the units of ada", "dbus-user-session"),
        ({"condition": {"sleeps": "its lid is shut"}}, "warning", "falls asleep when its lid is shut", "systemctl mask sleep.target"),
        ({"condition": {"passwords": True}}, "warning", "its sshd takes passwords", "PasswordAuthentication no in /etc/ssh/sshd_config"),
        ({"condition": {"root_login": "yes"}}, "warning", "its sshd lets root in", "PermitRootLogin no in /etc/ssh/sshd_config"),
        ({"condition": {"root_login": "yes"}, "user": "root"}, "warning", "lets root in by password",
            "PermitRootLogin prohibit-password in"),
        ({"condition": {"discharging": True}}, "warning", "battery", "plug it in"),
        ({"condition": {"has_rdma": True}, "memlock": 8 << 20}, "failed", "may lock 8 MiB", "LimitMEMLOCK=infinity"),
        ({"condition": {"has_rdma": True}, "memlock": 65 << 20}, "warning", "may lock 65 MiB", "LimitMEMLOCK=infinity"),
        ({"condition": {"shm": 64 << 20}}, "warning", "shared memory has 64 MiB", "remount"),
        ({"condition": {"open_files": 1024}}, "warning", "1024 files", "nofile"),
        ({"own_name": "127.0.1.1"}, "note", "127.0.1.1 there, as installers write it: harmless", ""),
    ],
)  # fmt: skip
def test_a_fault_of_a_host_is_named_with_it_and_a_fix(change: dict[str, Any], outcome: str, words: str, fix: str) -> None:
    (one,) = judged(look(0), look(1, **change))
    assert one[:2] == (outcome, "lab1") and words in one[2] and fix in one[3]


def test_a_host_may_have_a_limit_on_locked_memory_that_is_large_enough() -> None:
    assert judged(look(0), look(1, condition={"has_rdma": True}, memlock=512 << 20)) == []


@pytest.mark.parametrize(
    ("problem", "fix"),
    [
        ("host lab1 can't be reached: its host key is not known, and nothing was sent. X", "lockstep hosts setup lab"),
        ("host lab1 can't be reached: it doesn't let you in. X", "lockstep hosts setup lab"),
        ("host lab1 can't be reached: it doesn't answer. X", "ssh lab1"),
    ],
)
def test_a_host_that_can_t_be_reached_is_told_with_the_verb_that_helps(problem: str, fix: str) -> None:
    ((outcome, subject, _, told),) = judged(look(0), HostLook(CLUSTER.hosts[1], problem=problem))
    assert (outcome, subject) == ("failed", "lab1") and fix in told


def test_gpus_are_judged_by_who_has_them_and_by_what_torch_was_built_for() -> None:
    cuda = {"torch": Torch("12.1", ("sm_80", "sm_90"))}
    busy = replace(GPU, users=("bob (pid 7)",))
    new = replace(GPU, name="RTX 5070", capability=(12, 0))
    old = replace(GPU, capability=(7, 5))
    (used,) = judged(look(0, cuda, gpus=(GPU,)), look(1, cuda, gpus=(busy,)))
    assert used[:3] == ("warning", "lab1", "GPU 0 (RTX 4090) is used by bob (pid 7)")
    (unbuilt,) = judged(look(0, cuda, gpus=(GPU,)), look(1, cuda, gpus=(new,)))
    assert unbuilt[:2] == ("failed", "lab1") and "no code for GPU 0 (RTX 5070, sm_120), only sm_80 sm_90" in unbuilt[2]
    (no_cuda,) = judged(look(0, cuda, gpus=(GPU,)), look(1, {"torch": Torch()}, gpus=(GPU,)))
    assert no_cuda[:2] == ("failed", "lab1") and "no CUDA" in no_cuda[2]
    turing = {"torch": Torch("12.1", ("sm_75", "sm_80"))}
    assert ("note", "lab1", "a GPU there has no bf16: state precision: FP16 in jobs that use it", "") in judged(
        look(0, cuda, gpus=(GPU,)), look(1, turing, gpus=(old,))
    )
    (none,) = judged(look(0, cuda, gpus=(GPU,)), look(1))
    assert none[:3] == ("warning", "lab1", "it has no GPU, and other hosts have some")


def test_versions_that_differ_are_named_with_the_odd_host() -> None:
    ((outcome, subject, message, fix),) = judged(look(0), look(1, {"libraries": Libraries("3.12.4", {"torch": "2.5.0"})}))
    assert (outcome, subject, message) == (
        "failed",
        "lab1",
        "torch 2.5.0, and 2.6.0 on the other hosts",
    ) and "lockstep hosts setup lab" in fix


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        ({"openFiles": None}, "openFiles is null"),
        ({"discharging": 1}, "discharging is 1, but must be true or false"),
        ({"sleeps": "x" * 301}, "sleeps is"),
        ({"libraries": {"packages": {f"p{number}": "1" for number in range(65)}}}, "libraries.packages is"),
        ({"torch": {"architectures": ["sm_90"] * 65}}, "torch.architectures is"),
        ({"torch": {"problem": "x" * 301}}, "torch.problem is"),
        ({"gpuErrors": [["0000:3b:00", "79", "Xid"]]}, r"gpuErrors\[0\].number is"),
    ],
)
def test_an_answer_that_no_condition_has_is_refused_with_the_host(answer: dict[str, Any], field: str) -> None:
    with pytest.raises(BadAnswer, match=f"host lab0: its Python gives no valid answer .*it.{field}"):
        read_condition("lab0", {"openFiles": 1024, **answer})


NAMES = {number: f"lab{number}" for number in range(4)}
ENDS = {number: RailEnd("eth0", f"10.0.0.{number + 1}", mtu=1500) for number in NAMES}
PURPOSES = {"coordinator": 29400, "rendezvous": 29401, "any": 40000}


def network(count: int, failing: Collection[Pair] = (), only: str = "", slow: Collection[Pair] = (), **changes: Any) -> HostNetwork:
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    knocks = [
        Knock(*pair, port, purpose, "no answer in 3 s" if pair in failing and only in ("", purpose) else "")
        for pair in pairs
        for purpose, port in PURPOSES.items()
    ]
    rates = [PairRate("hosts", *pair, gbs=0.09 if pair in slow else 0.94) for pair in pairs if pair not in failing]
    names, ends = ({number: of[number] for number in range(count)} for of in (NAMES, ENDS))
    return replace(HostNetwork(names, ends, {1: "ufw"}, {}, knocks, rates), **changes)


@pytest.mark.parametrize(
    ("count", "failing", "subject", "fix"),
    [
        (3, {(0, 1), (2, 1)}, "lab0, lab2 → lab1",
            "as root on lab1: ufw allow from 10.0.0.1 to any proto tcp; ufw allow from 10.0.0.3 to any proto tcp"),
        (3, {(1, 0), (1, 2)}, "lab1 → lab0, lab2",
            "as root on lab1: ufw allow out to 10.0.0.1 proto tcp; ufw allow out to 10.0.0.3 proto tcp"),
        (3, {(0, 1)}, "lab0 → lab1", "as root on lab1: ufw allow from 10.0.0.1 to any proto tcp; if that changes nothing, lab0 must let it"
                                     " out"),
        (2, {(0, 1), (1, 0)}, "lab0 ↔ lab1", "as root on lab1: ufw allow from 10.0.0.1 to any proto tcp; as root on lab0: nft insert rule"),
        (3, {(0, 2), (1, 2), (2, 0), (2, 1)}, "lab2 ↔ lab0, lab1",
            "as root on lab2: nft insert rule inet filter input ip saddr { 10.0.0.1, 10.0.0.2 }"),
    ],
)  # fmt: skip
def test_who_does_not_reach_whom_is_explained_by_the_host_they_share(count: int, failing: set[Pair], subject: str, fix: str) -> None:
    (one,) = network_findings(network(count, failing), None)
    assert (one.outcome, one.subject) == (Outcome.FAILED, subject) and one.fix.startswith(fix)
    assert "ports 29400 (coordinator), 29401 (rendezvous), 40000 (any other): no answer in 3 s" in one.message


def test_groups_that_do_not_reach_each_other_are_named() -> None:
    crossing = {(one, other) for one in range(4) for other in range(4) if one // 2 != other // 2}
    (one,) = network_findings(network(4, crossing), None)
    assert one.subject == "[lab0, lab1] and [lab2, lab3]" and "VLAN" in one.fix


def test_one_port_alone_is_named_as_such() -> None:
    (one,) = network_findings(network(3, {(0, 2), (1, 2)}, only="coordinator"), None)
    assert (one.subject, one.message) == ("lab0, lab1 → lab2", "port 29400 (coordinator): no answer in 3 s")


def test_a_slow_cable_an_mtu_and_an_address_of_nobody_are_named() -> None:
    assert network_findings(network(3), None) == []
    (slow,) = network_findings(network(3, slow={(1, 0), (1, 2), (0, 1), (2, 1)}), None)
    assert (slow.outcome, slow.subject) == (Outcome.WARNING, "lab1 ↔ lab0, lab2") and slow.message.startswith("0.09 Gb/s")
    ends = {**{number: ENDS[number] for number in (0, 1)}, 2: replace(ENDS[2], mtu=9000)}
    (mtu,) = network_findings(network(3, ends=ends), None)
    assert (mtu.subject, mtu.message) == ("lab2", "the MTU of eth0 is 9000, and 1500 on the other hosts")
    assert [one.subject for one in network_findings(network(3, ends=ends), 9000)] == ["lab0", "lab1"]
    (deaf,) = network_findings(network(3, deaf={2: "can't listen on 10.0.0.3"}), None)
    assert deaf.subject == "lab2" and "hosts[].address" in deaf.fix
    stuck = [PairRate("hosts", 0, 1, error="timed out"), PairRate("hosts", 1, 0, gbs=0.94)]
    (one,) = network_findings(network(2, rates=stuck), None)
    assert one.subject == "lab0 → lab1" and "MTU" in one.fix


@pytest.mark.parametrize("count", range(2, 9))
def test_a_ring_measures_each_neighbor_once_and_nobody_twice_at_once(count: int) -> None:
    rounds = ring(range(count))
    pairs = [pair for part in rounds for pair in part]
    assert len(pairs) == len(set(map(frozenset, pairs))) == (1 if count == 2 else count)
    for part in rounds:
        nodes = [node for pair in part for node in pair]
        assert len(nodes) == len(set(nodes))


KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGG3q0eyxHCCwPnPLp3lDqVSYcL3M9kl3b8G6nFzqOyP"
OTHER = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"


def test_keys_are_written_into_the_file_and_every_comment_stays() -> None:
    text = with_host_keys(LAB, {"lab0": KEY, "lab1": OTHER})
    hosts = parse_cluster_file(text, "lab.yaml").hosts
    assert hosts is not None and [host.host_key for host in hosts.hosts] == [KEY, OTHER]
    assert "- name: lab0   # stays on\n    host_key: ssh-ed25519" in text and text.endswith("# the laptop\n")
    again = with_host_keys(text, {"lab1": KEY})
    assert again == text.replace(OTHER, KEY)
    assert text.replace(f"\n    host_key: {KEY}", "").replace(f", host_key: {OTHER}", "") == LAB


def test_a_host_whose_place_is_not_plain_is_named_with_the_line_to_write() -> None:
    with pytest.raises(ConfigError, match="write them by hand: lab9: host_key: ssh-ed25519"):
        with_host_keys(LAB, {"lab9": KEY})


def test_fingerprints_are_those_of_ssh() -> None:
    # ssh-keygen -lf of the key of github.com
    github = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"
    assert fingerprint(github) == "SHA256:+DiY3wvvV6TuJJhbpZisF/zLDA0zPMSvHdkr4UvCOqU"
    assert read_fingerprints([f"lab0={fingerprint(github)}"], ["lab0"]) == {"lab0": fingerprint(github)}
    for word, message in (("lab0=MD5:1", "NAME=SHA256:"), (f"lab7={fingerprint(github)}", "there is no host lab7"), ("x", "NAME=SHA256:")):
        with pytest.raises(ConfigError, match=message):
            read_fingerprints([word], ["lab0"])
    with pytest.raises(ConfigError, match="no public host key"):
        fingerprint("ssh-ed25519 !")


@pytest.mark.parametrize(
    ("planned", "fix", "checked"),
    [
        (Outcome.REFUSED, "", Outcome.FAILED), (Outcome.REFUSED, "fix", Outcome.FAILED), (Outcome.NOTE, "", Outcome.NOTE),
        (Outcome.NOTE, "fix", Outcome.WARNING), (Outcome.RISK, "fix", Outcome.RISK), (Outcome.OK, "", Outcome.OK),
    ],
)  # fmt: skip
def test_what_a_plan_refuses_fails_a_check_with_a_fix_or_without(planned: Outcome, fix: str, checked: Outcome) -> None:
    assert as_check(Finding("memory", planned, "it does not fit", fix)).outcome is checked


def test_a_host_may_have_8192_files_open() -> None:
    assert judged(look(0), look(1, {"open_files": 8192})) == []
    assert "8191 files" in judged(look(0), look(1, {"open_files": 8191}))[0][2]


@pytest.mark.parametrize(
    ("line", "gbs", "slow"),
    [(None, 0.51, False), (None, 0.49, True), (2.0, 1.1, False), (2.0, 0.9, True), (100.0, 2.6, False), (100.0, 2.4, True)],
)
def test_a_pair_is_slow_below_half_of_its_line_rate_of_which_five_gigabits_count(line: float | None, gbs: float, slow: bool) -> None:
    rates = [PairRate("hosts", 0, 1, gbs=gbs, line_gbs=line), PairRate("hosts", 1, 0, gbs=200.0, line_gbs=line)]
    assert len(network_findings(network(2, rates=rates), None)) == int(slow)


@pytest.mark.parametrize(("with_rdma", "enabled", "says"), [(2, False, True), (1, False, False), (2, True, False), (0, False, False)])
def test_hosts_whose_rdma_devices_the_file_leaves_unused_are_named(with_rdma: int, enabled: bool, says: bool) -> None:
    looks = [look(number, condition={"has_rdma": number < with_rdma}) for number in (0, 1)]
    spec = TrainingClusterSpec.model_validate({"network": {"rdma": {"enabled": enabled, "memlock": "Unlimited"}}})
    told = [(one.outcome.value, one.subject, one.message) for one in unused(spec, hosts_hardware(looks))]
    message = "lab0, lab1 have RDMA devices, and the file leaves RDMA off: ranks send over TCP, many times slower"
    assert told == ([("warning", "network.rdma.enabled", message)] if says else [])
