"""`lockstep doctor` on a bed with faults: each is named with its host or pair and with a fix, and nothing else is."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.clusters.doctorhosts import run_check
from lockstep.cli.shared.clusterfiles import load_cluster
from lockstep.cli.shared.inputs import read_inputs, resolve_inputs
from lockstep.cli.shared.jobargs import TargetOptions
from lockstep.devcluster.host import network
from lockstep.devcluster.hosts.tree import SITE
from lockstep.plan.cluster.finding import Finding, Outcome
from lockstep.platforms.hosts.backend import HostsBackend
from support.clusters.bed_hosts import OLD_PYTHON, BedHosts, limit, limited
from support.clusters.bed_jobs import BedJobs

CABLES = "2gbit"
"""Speed of each host's cable: no finding, and a measurement leaves the processors to others."""
HARMLESS = (Outcome.OK, Outcome.NOTE, Outcome.UNKNOWN)
TINY = {
    "model_type": "llama", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
TRAINING = """\
apiVersion: lockstep.dev/v1alpha1
kind: TrainingJob
metadata: {name: trains}
spec:
  nodes: 3
  training:
    model: {name: /workspace/models/stated}
    data: {path: /workspace/data.jsonl}
    optimization: {microBatchSize: 1, globalBatchSize: 2}
"""
Undo = Callable[[], object]
Plant = Callable[["Lab"], Undo]


class Lab:
    """The bed, its cluster file, and what a test does to both."""

    def __init__(self, bed: BedHosts, jobs: BedJobs) -> None:
        self.bed, self.jobs = bed, jobs

    @property
    def file(self) -> Path:
        return self.jobs.cluster

    def address(self, number: int) -> str:
        return self.bed.host(number).address

    def root(self, number: int, script: str) -> str:
        """Run root's shell script on a host."""
        return self.bed.console(number, "sh", "-ec", script)

    def rules(self, number: int, chain: str, *rules: str) -> Undo:
        """Give the host's firewall a chain (input or output) with these rules, behind one for what is answered."""
        lines = "\n".join(("ct state established accept", *rules))
        text = f"table inet planted {{\nchain c {{\ntype filter hook {chain} priority 0\n{lines}\n}}\n}}\n"
        self.bed.console(number, "nft", "-f", "-", stdin=text.encode())
        return lambda: self.root(number, "nft delete table inet planted")

    def stub(self, number: int, path: str, text: str) -> Undo:
        """Put a program on a host."""
        self.bed.console(number, "sh", "-ec", 'cat > "$1"; chmod 755 "$1"', "sh", path, stdin=text.encode())
        return lambda: self.root(number, f"rm {path}")

    def edited(self, old: str, new: str) -> Undo:
        """Change the cluster file."""
        before = self.file.read_text()
        assert old in before
        self.file.write_text(before.replace(old, new))
        return lambda: self.file.write_text(before)

    def check(self, job: Path | None = None) -> list[Finding]:
        """Findings of one check that are neither fine nor harmless."""
        return [one for one in self.findings(job) if one.outcome not in HARMLESS]

    def findings(self, job: Path | None = None) -> list[Finding]:
        """All findings of one check."""
        inputs = None if job is None else read_inputs(job, TargetOptions(str(self.file)))
        site = HostsBackend(load_cluster(str(self.file)), "lab")
        return asyncio.run(run_check(site, None if inputs is None else (inputs, resolve_inputs(inputs)))).findings


@pytest.fixture
def lab(bed: BedHosts, laptop: BedJobs) -> Iterator[Lab]:
    with limited(CABLES, *(host.link for host in bed.hosts), burst="2mb"):
        yield Lab(bed, laptop)


@pytest.fixture
def planted(lab: Lab) -> Iterator[Callable[[Plant], None]]:
    """Plant a fault, which is taken away at the end."""
    with ExitStack() as stack:
        yield lambda plant: stack.callback(plant(lab)) and None


def expect(findings: list[Finding], *expected: tuple[str, str, str]) -> None:
    """Each expected (subject, message, fix), the last two as patterns, is found once, and nothing else is."""
    left = list(findings)
    for subject, message, fix in expected:
        match = next((one for one in left if one.subject == subject and re.search(message, one.message) and re.search(fix, one.fix)), None)
        assert match is not None, f"{subject}: {message} → {fix} is not among\n" + "\n".join(map(str, findings))
        left.remove(match)
    assert left == [], "nothing else is wrong"


def test_a_healthy_bed_has_no_fault(lab: Lab) -> None:
    done = lab.jobs.type("doctor", str(lab.file), "-o", "json")
    values: dict[str, Any] = json.loads(done.stdout)
    assert values["ok"] and {one["outcome"] for one in values["findings"]} <= set(HARMLESS), values["findings"]
    assert len(values["knocks"]) == 18 and {one["purpose"] for one in values["knocks"]} == {"coordinator", "rendezvous", "any"}
    assert not any(one["problem"] for one in (*values["knocks"], *values["rates"])) and len(values["rates"]) == 6
    assert {29400, 29401} < {one["port"] for one in values["knocks"]}


def drop_in(lab: Lab) -> Undo:
    return lab.rules(1, "input", f"ip saddr {{ {lab.address(0)}, {lab.address(2)} }} tcp dport != 22 drop")


def drop_out(lab: Lab) -> Undo:
    return lab.rules(1, "output", f"ip daddr {{ {lab.address(0)}, {lab.address(2)} }} meta l4proto tcp drop")


def drop_one_way(lab: Lab) -> Undo:
    return lab.rules(1, "input", f"ip saddr {lab.address(0)} tcp dport != 22 reject with icmp type admin-prohibited")


def drop_one_port(lab: Lab) -> Undo:
    return lab.rules(2, "input", "tcp dport 29400 drop")


@pytest.mark.parametrize(
    ("plant", "subject", "message", "fix"),
    [
        (
            drop_in,
            "bed0, bed2 → bed1",
            r"^ports 29400 \(coordinator\), 29401 \(rendezvous\), \d+ \(any other\): no answer in 3 s$",
            r"^as root on bed1: nft insert rule inet filter input ip saddr \{ 10\.\d+\.0\.10, 10\.\d+\.0\.12 \} meta l4proto tcp accept",
        ),
        (drop_out, "bed1 → bed0, bed2", "bed1's own firewall stops what goes out", r"^as root on bed1: nft insert rule inet filter output"),
        (drop_one_way, "bed0 → bed1", r"^ports 29400 .*: No route to host$", r"^as root on bed1: nft .* ip saddr \{ 10\.\d+\.0\.10 \}"),
        (drop_one_port, "bed0, bed1 → bed2", r"^port 29400 \(coordinator\): no answer in 3 s$", r"^as root on bed2: nft"),
    ],
)
def test_a_firewall_is_named_with_who_does_not_reach_whom(
    plant: Plant, subject: str, message: str, fix: str, lab: Lab, planted: Callable[[Plant], None]
) -> None:
    planted(plant)
    expect(lab.check(), (subject, message, fix))


def small_mtu(lab: Lab) -> Undo:
    lab.root(2, "ip link set dev eth0 mtu 1400")
    return lambda: lab.root(2, "ip link set dev eth0 mtu 1500")


def no_linger(number: int) -> Plant:
    def plant(lab: Lab) -> Undo:
        lab.root(number, "loginctl disable-linger ada")
        return lambda: lab.root(number, "loginctl enable-linger ada")

    return plant


def kills_processes(lab: Lab) -> Undo:
    lab.root(
        1,
        "mkdir -p /etc/systemd/logind.conf.d; echo '[Login]\nKillUserProcesses=yes' > /etc/systemd/logind.conf.d/k.conf; systemctl restart"
        " systemd-logind",
    )
    return lambda: lab.root(1, "rm /etc/systemd/logind.conf.d/k.conf; systemctl restart systemd-logind")


def full_disk(lab: Lab) -> Undo:
    where = "/home/ada/lockstep/workspace"
    lab.root(0, f"su ada -c 'mkdir -p {where}'; mount -t tmpfs -o size=16m,uid=2001,gid=2001 tmpfs {where}")
    return lambda: lab.root(0, f"umount {where}")


OTHER = "/home/ada/other"


def other_torch(lab: Lab) -> Undo:
    """An environment on bed1 with the same packages, but for one version."""
    lab.root(1, f"python3 -m venv --without-pip {OTHER}; cd {OTHER}/lib/python3.*/site-packages; echo {SITE} > site.pth")
    lab.root(
        1,
        f"cd {OTHER}/lib/python3.*/site-packages; mkdir torch-9.9.9.dist-info; printf 'Name: torch\\nVersion: 9.9.9\\n' >"
        " torch-9.9.9.dist-info/METADATA",
    )
    undo = lab.edited("- name: bed1\n", f"- name: bed1\n    python: {OTHER}/bin/python\n")
    return lambda: (undo(), lab.root(1, f"rm -r {OTHER}"))


GPU = "GPU-11111111-2222-3333-4444-555555555555"
SMI = f"""#!/bin/sh
case "$*" in
*--query-gpu*) echo '0, {GPU}, Fake K40, 24564, 550.54, 3.0, 0, 00000000:01:00.0, [N/A]' ;;
*--query-compute-apps*) echo '{GPU}, 1, 20000' ;;
-L) echo 'GPU 0: Fake K40 (UUID: {GPU})' ;;
esac
"""


def busy_gpu(lab: Lab) -> Undo:
    return lab.stub(2, "/usr/local/bin/nvidia-smi", SMI)


def old_python(lab: Lab) -> Undo:
    """A python3 on bed2 that says it is 3.9, and no other one."""
    undos = [
        lab.stub(2, "/usr/local/bin/python3", OLD_PYTHON),
        lab.edited("- name: bed2\n", "- name: bed2\n    python: /usr/local/bin/python3\n"),
    ]
    return lambda: [undo() for undo in reversed(undos)]


def wireless(lab: Lab) -> Undo:
    lab.root(
        0,
        "mkdir -p /run/eth0/wireless; cd /sys/class/net/eth0; cp mtu operstate address ifindex /run/eth0; mount --bind /run/eth0"
        " /sys/devices/virtual/net/eth0",
    )
    return lambda: lab.root(0, "umount /sys/devices/virtual/net/eth0")


def unknown_key(lab: Lab) -> Undo:
    before = lab.file.read_text()
    parts = before.rpartition("    host_key:")
    lab.file.write_text(parts[0])
    return lambda: lab.file.write_text(before)


def public_addresses(lab: Lab) -> Undo:
    """Addresses of the Internet on all hosts, which the file states."""
    before, bridge = lab.file.read_text(), ("198.41.0.1/24", "dev", lab.bed.layout.bridge)
    network.run("ip", "address", "add", *bridge)
    for host in lab.bed.hosts:
        lab.root(host.number, f"ip address add 198.41.0.{10 + host.number}/24 dev eth0")
    lab.file.write_text(re.sub(r"address: 10\.\d+\.0\.", "address: 198.41.0.", before))

    def undo() -> None:
        lab.file.write_text(before)
        network.run("ip", "address", "del", *bridge)
        for host in lab.bed.hosts:
            lab.root(host.number, f"ip address del 198.41.0.{10 + host.number}/24 dev eth0")

    return undo


def shared_workspace(lab: Lab) -> Undo:
    """One folder that bed0 and bed1 both have as their workspace."""
    mount = (
        "install -d -o ada -g ada /shared/w /home/ada/lockstep /home/ada/lockstep/workspace; mount --bind /shared/w"
        " /home/ada/lockstep/workspace"
    )
    for number in (0, 1):
        lab.root(number, mount)
    return lambda: [lab.root(number, "umount /home/ada/lockstep/workspace") for number in (0, 1)]


def one_that_is_full(lab: Lab) -> Undo:
    """One file system for all, as the file states, and on bed1 one that has bytes but no room for a file."""
    undos = [lab.edited("defaults:\n", "storage: {mode: rwx}\ndefaults:\n")]
    workspace = "/home/ada/lockstep/workspace"
    mounts = ["mount --bind /shared/w {}", "mount -t tmpfs -o size=20g,nr_inodes=1,uid=2001,gid=2001 tmpfs {}"]
    for number in range(3):
        lab.root(number, f"install -d -o ada -g ada /shared/w /home/ada/lockstep {workspace}; {mounts[number == 1].format(workspace)}")
    return lambda: [undo() for undo in undos] + [lab.root(number, f"umount {workspace}") for number in range(3)]


def noisy_shell(lab: Lab) -> Undo:
    lab.root(2, "cp /home/ada/.bashrc /home/ada/.bashrc.before; sed -i '1i echo welcome' /home/ada/.bashrc")
    return lambda: lab.root(2, "mv /home/ada/.bashrc.before /home/ada/.bashrc")


def slow_cable(lab: Lab) -> Undo:
    limit(lab.bed.host(1).link, "100mbit")
    lab.root(1, "tc qdisc add dev eth0 root tbf rate 100mbit burst 64kb latency 50ms")
    return lambda: lab.root(1, "tc qdisc del dev eth0 root")


@pytest.mark.parametrize(
    ("plants", "expected"),
    [
        (
            [small_mtu, no_linger(0), no_linger(1), kills_processes],
            [
                ("bed2", r"^the MTU of eth0 is 1400, and 1500 on the other hosts$", r"^as root on bed2: ip link set dev eth0 mtu 1500"),
                (
                    "bed0",
                    r"^a job does not come back after a reboot, since ada has no linger there$",
                    r"as root on bed0: loginctl enable-linger ada$",
                ),
                (
                    "bed1",
                    "^it ends all that ada runs at the end of the login .KillUserProcesses",
                    r"as root on bed1: loginctl enable-linger ada$",
                ),
            ],
        ),
        (
            [full_disk, other_torch, busy_gpu],
            [
                ("bed0", r"^its workspace /home/ada/lockstep/workspace has 1\d\.\d MB free$", "another disk"),
                ("bed1", r"^torch 9\.9\.9, and 2\..* on the other hosts$", "lockstep hosts setup lab"),
                (
                    "bed2",
                    r"^GPU 0 \(Fake K40\) is used by root \(pid 1\)$",
                    r"wait for them, end them, or leave the GPU out of hosts\[\]\.gpus",
                ),
                ("bed2", "^its torch has no (CUDA|code for GPU 0)", "install"),
                ("bed0, bed1", "^it has no GPU, and other hosts have some$", "--without"),
            ],
        ),
        (
            [old_python, wireless],
            [
                (
                    "bed2",
                    r"^its hosts\[\]\.python /usr/local/bin/python3 is Python 3\.9, and 3\.10 or newer is needed$",
                    r"^state another one, or leave it out, and lockstep hosts setup lab makes an environment$",
                ),
                ("bed0", r"^its interface eth0 is wireless", "use a cable"),
            ],
        ),
        (
            [unknown_key],
            [("bed2", "^its host key is not known, and nothing was sent", "^lockstep hosts setup lab shows the key's fingerprint")],
        ),
        (
            [public_addresses, shared_workspace, noisy_shell],
            [
                *((name, r"^its address 198\.41\.0\.1\d is public", "WireGuard or Tailscale") for name in ("bed0", "bed1", "bed2")),
                (
                    "storage",
                    r"^bed0, bed1 see one and the same /home/ada/lockstep/workspace, though storage.mode",
                    "^state storage.mode: rwx",
                ),
                ("bed2", r"^its login shell prints 'welcome' before any program runs$", "print nothing"),
            ],
        ),
        (
            [one_that_is_full],
            [
                (
                    "bed1",
                    "^nothing can be written to its workspace: /home/ada/lockstep/workspace: No space left on device$",
                    "hosts\\[\\].workspace$",
                )
            ],
        ),
        ([slow_cable], [("bed1 ↔ bed0, bed2", r"^0\.\d+ Gb/s(, and up to .* between others)?$", "tc qdisc show dev eth0 on bed1")]),
    ],
    ids=["keeping", "packages", "old", "key", "public and shared", "unwritable", "slow"],
)
def test_each_fault_is_named_with_its_host_and_a_fix(
    plants: list[Plant], expected: list[tuple[str, str, str]], lab: Lab, planted: Callable[[Plant], None]
) -> None:
    for plant in plants:
        planted(plant)
    expect(lab.check(), *expected)


def test_a_clock_that_is_wrong_is_named(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    monkeypatch.setattr("lockstep.platforms.hosts.checkup.now", lambda: now() + 60)
    found = lab.check()
    expect(
        found,
        *(
            (name, r"^its clock is [56]\d s behind this machine's$", f"^as root on {name}: timedatectl set-ntp true")
            for name in ("bed0", "bed1", "bed2")
        ),
    )


def test_a_job_is_compared_with_its_hosts(lab: Lab) -> None:
    job = lab.jobs.job("fits", nodes=3)
    assert lab.check(job) == []
    lab.root(1, "rm /home/ada/lockstep/workspace/rank.py")
    expect(
        lab.check(job),
        ("bed1", r"^spec\.script\.path: there is no file ~?/.*rank\.py$", r"^lockstep cp PATH fits:/workspace/rank\.py --cluster "),
    )


def test_a_job_is_compared_with_its_hosts_by_the_config_json_of_the_model_that_they_have(lab: Lab) -> None:
    for number in range(lab.jobs.bed.count):
        lab.jobs.put(number, "models/stated/config.json", json.dumps(TINY, indent=2).encode())
        lab.jobs.put(number, "data.jsonl", b'{"text": "a"}\n')
    job = lab.jobs.folder / "trains.yaml"
    job.write_text(TRAINING)
    findings = lab.findings(job)
    (memory,) = [one.message for one in findings if one.subject == "memory" and one.outcome is Outcome.OK]
    assert re.match(r"bed0's memory \(\d.*\) needs about \d.*; bed1's memory .*; bed2's memory ", memory), memory
    (idle,) = [one.message for one in findings if one.subject == "ranks"]
    assert "1 of 3 have nothing to do in any step. State a globalBatchSize of 3 or more" in idle
