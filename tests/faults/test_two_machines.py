"""`lockstep launch` and `lockstep join` on two machines with a network of their own each, a cable between them, and nothing else in common.
Needs root.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.launched import SAVES, Machine, Typed, machines_in_namespaces, wait_until, write_job

PORT = 29600
OPEN = range(PORT, PORT + 66)
ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print("sum", total.item(), "over", os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"], flush=True)
dist.barrier()
dist.destroy_process_group()
"""

STEPS = """
import json, os, socket, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
agent = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
agent.connect(os.environ["LOCKSTEP_REPORT_SOCKET"])
for step in range(1, 100_000):
    dist.all_reduce(torch.ones(1))
    agent.send(json.dumps({"event": "step", "rank": dist.get_rank(), "step": step}).encode())
    if step == 20:
        print("twenty steps in attempt", os.environ["LOCKSTEP_ATTEMPT"], flush=True)
    time.sleep(0.1)
"""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    if os.geteuid() != 0:
        pytest.fail("making network namespaces needs root, as the other tests of this folder do")
    with machines_in_namespaces(tmp_path) as both:
        for machine in both:
            machine.write("script.py", SAVES)
        yield both


def launched(machine: Machine) -> tuple[Typed, str]:
    """A launch on the machine, and its token."""
    job = machine.folder / "job.yaml"
    if not job.exists():
        write_job(machine.folder, script={"path": "script.py"})
    first = machine.type("launch", "--at", f"{machine.address}:{PORT}", "-f", str(job))
    path = machine.folder / f"state/lockstep/launch/x-{PORT}.token"
    wait_until(path.exists, "no token was written")
    return first, path.read_text().strip()


def place(machine: Machine) -> str:
    return f"{machine.address}:{PORT}"


def test_ranks_meet_over_the_interface_of_each_machine(machines: list[Machine]) -> None:
    for machine in machines:
        machine.write("script.py", ALL_REDUCE)
    first, token = launched(machines[0])
    second = machines[1].type("join", place(machines[0]), given=token)
    assert (first.ends(), second.ends()) == (0, 0), first.output
    assert "sum 3.0 over nic0 =nic0" in first.output
    assert "sum 3.0 over nic1 =nic1" in second.output
    assert "preflight warning" not in first.output


def test_they_listen_on_the_stated_address_alone(machines: list[Machine]) -> None:
    first, token = launched(machines[0])
    second = machines[1].type("join", place(machines[0]), given=token)
    first.sees("all 2 ranks run")
    listening = [_listening(machine) for machine in machines]
    assert {(machines[0].address, PORT), (machines[0].address, PORT + 1)} <= listening[0]
    for machine, sockets in zip(machines, listening, strict=True):
        assert {address for address, _ in sockets} <= {machine.address, "127.0.0.1"}, sockets
    assert not [port for address, port in listening[0] if address == machines[0].address and port not in OPEN]
    for machine in machines:
        machine.write("go", "")
    assert (first.ends(), second.ends()) == (0, 0)


def _listening(machine: Machine) -> set[tuple[str, int]]:
    program = [sys.executable, "-c", "print(open('/proc/net/tcp').read(), open('/proc/net/tcp6').read())"]
    command = ["ip", "netns", "exec", machine.namespace, *program]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sockets = set()
    for address, port, state in re.findall(r"^\s*\d+: ([0-9A-F]+):([0-9A-F]{4}) [0-9A-F]+:[0-9A-F]{4} ([0-9A-F]{2})", shown, re.MULTILINE):
        if state == "0A":
            number = ".".join(str(byte) for byte in reversed(bytes.fromhex(address))) if len(address) == 8 else address
            sockets.add((number, int(port, 16)))
    return sockets


@pytest.mark.parametrize("lost", [1, 0])
def test_a_machine_that_lost_its_power_comes_back_by_the_same_line(lost: int, machines: list[Machine]) -> None:
    first, token = launched(machines[0])
    second = machines[1].type("join", place(machines[0]), given=token)
    first.sees("all 2 ranks run")
    machines[lost].lose_power()
    if lost == 1:
        second = machines[1].type("join", place(machines[0]), given=token)
        first.sees("node 1 is back")
    else:
        second.sees("lost the connection to the launch")
        first, same = launched(machines[0])
        assert same == token
    first.sees("all 2 ranks run", 2 if lost == 1 else 1)
    for machine in machines:
        machine.write("go", "")
    assert (first.ends(), second.ends()) == (0, 0), first.output
    assert "attempt 2 starts" in first.output


def test_a_machine_that_can_not_take_part_is_told_why_and_the_launch_waits_for_another(machines: list[Machine]) -> None:
    job = write_job(
        machines[0].folder,
        script={"path": "script.py"},
        gpusPerNode=1,
        env=[{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}],
    )
    first = machines[0].type("launch", "--at", place(machines[0]), "-f", str(job), CUDA_VISIBLE_DEVICES="0", TOKEN="x")
    path = machines[0].folder / f"state/lockstep/launch/x-{PORT}.token"
    wait_until(path.exists, first.output)
    second = machines[1].type("join", place(machines[0]), given=path.read_text(), CUDA_VISIBLE_DEVICES="")
    assert second.ends() == 2
    assert f"({machines[1].address}) has 0 GPUs that may be used (CUDA_VISIBLE_DEVICES is set there)" in second.output
    first.sees("refused ")
    assert first.process.poll() is None


def test_a_firewall_that_forgets_connections_is_no_rank_s_hang(machines: list[Machine]) -> None:
    for machine in machines:
        machine.write("script.py", STEPS)
    write_job(machines[0].folder, script={"path": "script.py"}, hangTimeouts={"stepSeconds": 12})
    first, token = launched(machines[0])
    machines[1].type("join", place(machines[0]), given=token)
    first.sees("twenty steps in attempt 1")
    _forget_connections(machines[1])
    first.sees("twenty steps in attempt 2")
    assert "none of them is to blame: connections between them may be dead since then" in first.output
    assert "on node 1 hangs" not in first.output


def _forget_connections(machine: Machine) -> None:
    """Drop what belongs to the connections that are open now; new ones pass."""
    inside = ["ip", "netns", "exec", machine.namespace]
    shown = subprocess.run([*inside, "ss", "-Htn", "state", "established"], capture_output=True, text=True, check=True).stdout
    for line in shown.splitlines():
        own, other = (end.rpartition(":")[2] for end in line.split()[2:4])
        for chain, ports in (("INPUT", (other, own)), ("OUTPUT", (own, other))):
            rule = ["-A", chain, "-p", "tcp", "--sport", ports[0], "--dport", ports[1], "-j", "DROP"]
            subprocess.run([*inside, "iptables", *rule], capture_output=True, check=True)
