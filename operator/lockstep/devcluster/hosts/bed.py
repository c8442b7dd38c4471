"""Bring the bed of hosts up, take it down, and do to hosts what happens to real ones: no power, no cable, a lid that is shut."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.api.errors import Failed
from lockstep.devcluster import python_volume
from lockstep.devcluster.host import cgroups, machine, network, processes
from lockstep.devcluster.hosts import boot
from lockstep.devcluster.hosts.layout import USERS, BedLayout, HostLayout
from lockstep.devcluster.hosts.needs import HOSTS, ensure
from lockstep.devcluster.hosts.tree import ENVIRONMENT, host_tree, tree_path

Say = Callable[[str], None]
BOOT_SECONDS = 90.0
POLL_SECONDS = 0.05
KEPT = {"disks", "laptop", "lock", "logs", "shared", "starting"}
"""Entries of the state folder that `down` keeps."""
CONSOLE_ENVIRONMENT = {"HOME": "/root", "LANG": "C.UTF-8", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


class BedError(Failed):
    """A host did not come up or go away, or a command on it failed. The message says which log tells more."""


def up(bed: BedLayout, hosts: int, say: Say) -> Path:
    """Bring up so many hosts, and return the cluster file that describes them. What runs is left alone.

    Raises:
        ConfigError: this machine can't do it; the message lists what is missing.
        BedError: a host's sshd doesn't answer; the message names its log.
        RuntimeError: the hosts' disk could not be made, or hosts could not see the packages.
    """
    with processes.exclusive(bed.state, bed.starting):
        with processes.shared_things(bed.root):
            ensure(HOSTS, bed, say)
            python_volume.publish_packages(bed.root / "python")
            host_tree(bed.root, say)
            bed.compiled_code.mkdir(exist_ok=True)
            bed.code.mkdir(exist_ok=True)
            python_volume.publish_code(bed.code, bed.compiled_code)
        bed.laptop.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not bed.identity.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lockstep-bed", "-f", str(bed.identity)], check=True)
        network.create_bridge(bed.bridge, bed.gateway)
        layouts = [bed.host(number) for number in range(hosts)]
        for host in layouts:
            if processes.running(bed.daemons, host.name) is None:
                start(host, layouts)
        for host in layouts:
            await_sshd(host)
            _let_in(host)
        say(f"{', '.join(host.name for host in layouts)} answer")
        return write_cluster_file(bed, hosts)


def down(bed: BedLayout, say: Say, *, purge: bool = False) -> None:
    """Take all hosts' power, and remove the network. `purge`: their disks, too."""
    with processes.exclusive(bed.state, bed.starting):
        for number in numbers(bed):
            end(bed.host(number))
        cgroups.remove(*cgroups.of_cluster(bed.name))
        network.remove_all(f"lh{bed.index}", bed.bridge)
        if not cgroups.others(bed.name):
            network.forget_namespaces()
        machine.clear(bed.state, lambda path: path.name in KEPT)
        if purge:
            shutil.rmtree(bed.state)
    say("the hosts are down" + ("" if purge else "; their disks are kept"))


def console(host: HostLayout, *command: str, stdin: bytes = b"") -> bytes:
    """Output of a command of root's on the host. Raises BedError with its last words."""
    done = subprocess.run(console_command(host, *command), input=stdin, capture_output=True, check=False, env=CONSOLE_ENVIRONMENT)
    if done.returncode != 0:
        message = (done.stderr or done.stdout).decode(errors="replace").strip()[-500:]
        raise BedError(f"{host.name}: {' '.join(command)}: {message or f'exit code {done.returncode}'}")
    return done.stdout


def console_command(host: HostLayout, *command: str) -> list[str]:
    """Command that runs `command` as root on the host. Raises BedError when it has no power."""
    pid = first_process(host)
    if pid is None:
        raise BedError(f"{host.name} has no power")
    return ["nsenter", "-t", str(pid), "-a", "--", *command]


def first_process(host: HostLayout) -> int | None:
    """Id, on this machine, of the host's systemd: the one child of the process that made its namespaces. None: it has no power."""
    daemon = processes.running(host.bed.daemons, host.name)
    try:
        children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split() if daemon else []
    except OSError:  # it ended just now
        children = []
    return int(children[0]) if children else None


def status(bed: BedLayout) -> dict[str, bool]:
    """Name of every host that was made, and whether it has power."""
    hosts = [bed.host(number) for number in numbers(bed)]
    return {host.name: processes.running(bed.daemons, host.name) is not None for host in hosts}


def await_sshd(host: HostLayout) -> None:
    """Wait until its sshd answers. Raises BedError."""
    deadline = time.monotonic() + BOOT_SECONDS
    while True:
        with suppress(OSError), socket.create_connection((host.address, 22), timeout=1.0) as connection:
            connection.settimeout(2.0)
            if connection.recv(8).startswith(b"SSH-"):
                return
        if processes.running(host.bed.daemons, host.name) is None or time.monotonic() > deadline:
            reason = machine.too_few_instances(host.log)
            raise BedError(f"sshd of {host.name} at {host.address} doesn't answer{f': {reason}' if reason else ''} (see {host.log})")
        time.sleep(POLL_SECONDS)


def host_key(host: HostLayout) -> str:
    """Public key of the host, read from its disk, where nobody in between can change it."""
    kind, key, *_ = (host.disk / "upper" / f"{boot.HOST_KEY}.pub").read_text().split()
    return f"{kind} {key}"


def write_cluster_file(bed: BedLayout, hosts: int) -> Path:
    """Write the cluster file of the bed beside its state, and return its path."""
    lines = [
        "cluster:",
        f"  name: beds{bed.index or ''}",
        "  platform: hosts",
        "  description: Hosts on this one machine (lockstep devcluster up --hosts N)",
        "defaults:",
        f"  user: {next(iter(USERS))}",
        f"  identity: {bed.identity}",
        f"  python: {ENVIRONMENT}/bin/python",
        "hosts:",
    ]
    for number in range(hosts):
        host = bed.host(number)
        lines += [f"  - name: {host.name}", f"    address: {host.address}", f"    host_key: {host_key(host)}"]
    bed.cluster_file.write_text("\n".join(lines) + "\n")
    return bed.cluster_file


def start(host: HostLayout, hosts: Sequence[HostLayout]) -> None:
    bed = host.bed
    network.connect(host.namespace, host.link, host.address, bed.bridge)
    bed.shared.mkdir(exist_ok=True)
    bed.shared.chmod(0o1777)
    end(host)  # and its groups: it begins without any
    group = group_of(host)
    group.mkdir(exist_ok=True)
    site = (bed.root / "python" / python_volume.SITE).resolve()
    folders = [tree_path(bed.root), host.disk, host.name, site, bed.code, bed.shared]
    peers = [f"{other.name}={other.address}" for other in hosts if other.number != host.number]
    words = [str(group / "cgroup.procs"), *map(str, folders), *peers]
    command = ["nsenter", f"--net=/run/netns/{host.namespace}", sys.executable, "-m", "lockstep.devcluster.hosts.boot", *words]
    processes.start(bed.daemons, host.name, command, host.log, host.cgroup, bed.starting)


def end(host: HostLayout) -> None:
    """Kill all of its processes at once, by its first one, and remove its control groups."""
    pid = first_process(host)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    cgroups.remove(host.cgroup)


def _let_in(host: HostLayout) -> None:
    """Let the laptop's key in as every user, and let the first one's units run on without a login."""
    key = host.bed.identity.with_suffix(".pub").read_bytes()
    for name in USERS:
        if not (host.disk / "upper/home" / name / ".ssh/authorized_keys").exists():
            script = 'mkdir -m 700 -p "$1" && cat > "$1/authorized_keys" && chown -R "$2:$2" "$1"'
            console(host, "sh", "-c", script, "sh", f"/home/{name}/.ssh", name, stdin=key)
    lingering = next(iter(USERS))
    if not (host.disk / "upper/var/lib/systemd/linger" / lingering).exists():
        console(host, "loginctl", "enable-linger", lingering)


def numbers(bed: BedLayout) -> list[int]:
    """Return the numbers of the hosts that were made."""
    disks = bed.state / "disks"
    return sorted(int(path.name) for path in disks.iterdir()) if disks.is_dir() else []


def group_of(host: HostLayout) -> Path:
    """Return the control group of all its processes. Raises BedError."""
    folder = cgroups.unified()
    if folder is None:
        raise BedError("control groups of version 2 are not mounted (lockstep devcluster up --hosts N says what this machine lacks)")
    return folder / host.cgroup
