"""`python -m lockstep.devcluster.hosts.boot`: become a host: first a process in its namespaces and control group, then its systemd.

    boot GROUP TREE DISK NAME SITE CODE SHARED [PEER=ADDRESS ...]

GROUP is the cgroup.procs file of the host's group in the hierarchy of version 2. Needs root, and runs in the host's network namespace.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from lockstep.devcluster.hosts import tree as disk_tree

INSIDE = "--inside"
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
LINKS = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
ENVIRONMENT = {"container": "lockstep", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
SYSTEMD = ["/lib/systemd/systemd", "--log-target=console", "--log-level=info", "--show-status=true"]
HOST_KEY = "etc/ssh/ssh_host_ed25519_key"


def main(words: Sequence[str]) -> None:
    if words[0] == INSIDE:
        become_systemd(*words[1:])
    else:
        enter_namespaces(*words)


def enter_namespaces(group: str, *rest: str) -> None:
    """Join the control group, and begin again as the first process of new namespaces."""
    Path(group).write_text(str(os.getpid()))
    own = [sys.executable, "-m", "lockstep.devcluster.hosts.boot", INSIDE, *rest]
    spaces = ["--mount", "--pid", "--uts", "--ipc", "--cgroup", "--fork", "--kill-child", "--propagation", "private"]
    os.execvp("unshare", ["unshare", *spaces, *own])  # noqa: S606 (it becomes the host)


def become_systemd(tree: str, disk: str, name: str, site: str, code: str, shared: str, *peers: str) -> None:
    """Mount, as the first process of the new namespaces, all that a host has, and become its systemd."""
    root = Path(disk, "root")
    for folder in (root, Path(disk, "upper"), Path(disk, "work")):
        folder.mkdir(parents=True, exist_ok=True)
    _mount("overlay", root, kind="overlay", options=f"lowerdir={tree},upperdir={disk}/upper,workdir={disk}/work")
    _mount("proc", root / "proc", kind="proc", options="nosuid,noexec,nodev")
    _mount("sysfs", root / "sys", kind="sysfs", options="ro,nosuid,noexec,nodev")  # writable, it would start udev
    _mount("cgroup2", root / "sys/fs/cgroup", kind="cgroup2", options="nosuid,noexec,nodev")
    _make_devices(root / "dev")
    _mount("tmpfs", root / "run", kind="tmpfs", options="mode=755")
    # The kernel's own is this machine's, which does not start anew with the host.
    (root / "run/boot_id").write_text(f"{uuid.uuid4()}\n")
    _bind(root / "run/boot_id", root / "proc/sys/kernel/random/boot_id", read_only=True)
    _mount("tmpfs", root / "tmp", kind="tmpfs", options="mode=1777")
    for source, target in ((site, disk_tree.SITE), (code, disk_tree.CODE)):
        _bind(Path(source), root / target.lstrip("/"), read_only=True)
    _bind(Path(shared), root / "shared")
    (root / "etc/hostname").write_text(f"{name}\n")
    # As installers write it: a host's own name is a loopback address.
    lines = ["127.0.0.1 localhost", f"127.0.1.1 {name}", *(" ".join(reversed(peer.split("="))) for peer in peers)]
    (root / "etc/hosts").write_text("\n".join(lines) + "\n")
    if not (root / "etc/machine-id").read_text():
        (root / "etc/machine-id").write_text(f"{uuid.uuid4().hex}\n")  # systemd would take the hardware's, which all hosts share
    if not (root / HOST_KEY).exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(root / HOST_KEY)], check=True)
    subprocess.run(["hostname", name], check=True)
    old = root / "old"
    old.mkdir(exist_ok=True)
    os.chdir(root)
    subprocess.run(["pivot_root", ".", "old"], check=True)
    os.chroot(".")
    os.chdir("/")
    subprocess.run(["umount", "-l", "/old"], check=True)
    os.execve(SYSTEMD[0], SYSTEMD, ENVIRONMENT)  # noqa: S606


def _make_devices(dev: Path) -> None:
    _mount("tmpfs", dev, kind="tmpfs", options="mode=755")
    for name in DEVICES:
        (dev / name).touch()
        _bind(Path("/dev", name), dev / name)
    (dev / "pts").mkdir()
    _mount("devpts", dev / "pts", kind="devpts", options="newinstance,ptmxmode=0666,mode=620,gid=5")
    (dev / "shm").mkdir()
    _mount("tmpfs", dev / "shm", kind="tmpfs", options="mode=1777")
    for link, target in LINKS.items():
        (dev / link).symlink_to(target)


def _mount(source: str, target: Path, *, kind: str, options: str) -> None:
    subprocess.run(["mount", "-t", kind, "-o", options, source, str(target)], check=True)


def _bind(source: Path, target: Path, *, read_only: bool = False) -> None:
    subprocess.run(["mount", "--bind", str(source), str(target)], check=True)
    if read_only:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(target)], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
