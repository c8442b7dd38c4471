"""What a machine must have for the embedded cluster: observed first, judged purely, and only then installed."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lockstep.api.errors import ConfigError
from lockstep.devcluster import binary, images
from lockstep.devcluster.layout import Layout
from lockstep.devcluster.node import cni_folder
from lockstep.devcluster.python_volume import python_minor

PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "ip": "iproute2",
    "conntrack": "conntrack",
    "debootstrap": "debootstrap",
    "nsenter": "util-linux",
    "sysctl": "procps",
}
CNI_PACKAGE = "containernetworking-plugins"
DISTRIBUTIONS = ("debian", "ubuntu")
DISTRIBUTION_PYTHON = {"bookworm": "3.11", "trixie": "3.13", "noble": "3.12", "jammy": "3.10"}
FILE_SYSTEMS = ("overlay", "tmpfs", "proc")
NAMESPACES = ("net", "mnt", "pid", "ipc", "uts")


@dataclass(frozen=True)
class Facts:
    """What was seen of the machine."""

    system: str
    is_root: bool
    distribution: str
    codename: str
    commands: frozenset[str]
    has_cni: bool
    has_go: bool
    is_built: bool
    file_systems: frozenset[str]
    namespaces: frozenset[str]
    cgroup_writable: bool
    python: str
    has_base_image: bool


@dataclass(frozen=True)
class Verdict:
    """`missing`: why it can't be done, one sentence each; `install`: packages that would mend the rest."""

    missing: tuple[str, ...]
    install: tuple[str, ...]


def observe(layout: Layout) -> Facts:
    linux = platform.system() == "Linux"
    release = images.release() if linux and Path("/etc/os-release").exists() else {}
    known = Path("/proc/filesystems").read_text().split() if linux else []
    return Facts(
        system=platform.system(),
        is_root=os.geteuid() == 0,
        distribution=release.get("ID", ""),
        codename=release.get("VERSION_CODENAME", ""),
        commands=frozenset(name for name in PACKAGES if shutil.which(name)),
        has_cni=cni_folder() is not None,
        has_go=shutil.which("go") is not None,
        is_built=binary.is_built(layout.root),
        file_systems=frozenset(known),
        namespaces=frozenset(p.name for p in Path("/proc/self/ns").iterdir()) if linux else frozenset(),
        cgroup_writable=os.access("/sys/fs/cgroup", os.W_OK),
        python=python_minor(),
        has_base_image=images.base_path(layout.root).exists() if release else False,
    )


def judge(facts: Facts) -> Verdict:
    """What stands in the way, all of it. Nothing is changed before this says that nothing does."""
    if facts.system != "Linux":
        return Verdict((f"this is {facts.system}; the embedded cluster needs Linux",), ())
    missing = []
    if not facts.is_root:
        missing.append("it needs root: network namespaces and mounts are made (sudo, or `lockstep run --local`, which needs none)")
    for kind, wanted, seen in (("file system", FILE_SYSTEMS, facts.file_systems), ("namespace", NAMESPACES, facts.namespaces)):
        missing += [f"the kernel has no {kind} `{name}`" for name in wanted if name not in seen]
    if facts.is_root and not facts.cgroup_writable:
        missing.append("/sys/fs/cgroup is read-only: control groups can't be made")
    if not facts.is_built and not facts.has_go:
        missing.append("there is no Go (1.24 or newer) to build Kubernetes with: https://go.dev/doc/install, or apt-get install golang-go")
    expected = DISTRIBUTION_PYTHON.get(facts.codename)
    if expected and facts.python != expected:
        missing.append(
            f"the Python of `.venv` is {facts.python}, pods have {facts.codename}'s {expected}: make setup PYTHON=/usr/bin/python{expected}"
        )
    packages = sorted(
        {package for command, package in PACKAGES.items() if command not in facts.commands}
        | ({CNI_PACKAGE} if not facts.has_cni else set())
    )
    if facts.has_base_image and "debootstrap" in packages:
        packages.remove("debootstrap")
    if facts.distribution not in DISTRIBUTIONS:
        missing += (
            [f"{facts.distribution or 'this system'} is neither Debian nor Ubuntu, whose packages the base image is made of"]
            if not facts.has_base_image
            else []
        )
        missing += [f"install {package} (on Debian and Ubuntu this is done for you)" for package in packages]
        packages = []
    return Verdict(tuple(missing), tuple(packages))


def ensure(layout: Layout, say: Callable[[str], None]) -> None:
    """Install what apt has; refuse, before anything is changed, when something else is missing.

    Raises:
        ConfigError: what is missing, a line each.
    """
    verdict = judge(observe(layout))
    if verdict.missing:
        raise ConfigError("the embedded cluster can't run here:\n" + "\n".join(f"  - {line}" for line in verdict.missing))
    if verdict.install:
        say(f"installing the packages {' '.join(verdict.install)} (apt-get)")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *verdict.install]):
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise ConfigError(
                    f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}"
                )
