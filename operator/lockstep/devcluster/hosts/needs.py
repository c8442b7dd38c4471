"""Needs of the bed of hosts on its machine: observed first, judged purely, and only then installed."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lockstep.devcluster import images, needs
from lockstep.devcluster.host import cgroups
from lockstep.devcluster.hosts.layout import BedLayout
from lockstep.devcluster.hosts.tree import tree_path
from lockstep.devcluster.python_volume import python_minor

PACKAGES = {
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "unshare": "util-linux",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}
NAMESPACES = (*needs.NAMESPACES, "cgroup")
PROBES = {name: command for name, command in needs.PROBES.items() if command[0] == "ip"}


@dataclass(frozen=True)
class BedFacts:
    """The machine as it was observed."""

    system: str
    is_root: bool
    distribution: str
    commands: frozenset[str]
    lacks: frozenset[str]
    groups: Path | None
    """Folder of control groups of version 2; None: they aren't mounted."""
    groups_writable: bool
    python: str
    base_python: str | None
    has_tree: bool
    networks: tuple[str, ...]
    routes: tuple[tuple[str, str], ...]


def observe_bed(bed: BedLayout) -> BedFacts:
    """Look at the machine, and change nothing that outlives the look."""
    linux, root = platform.system() == "Linux", os.geteuid() == 0
    release = images.os_release() if linux and Path("/etc/os-release").exists() else {}
    groups = cgroups.unified()
    return BedFacts(
        system=platform.system(),
        is_root=root,
        distribution=release.get("ID", ""),
        commands=frozenset(name for name in PACKAGES if shutil.which(name)),
        lacks=frozenset(needs.kernel_lacks(NAMESPACES, PROBES)) if linux and root else frozenset(),
        groups=groups,
        groups_writable=groups is not None and os.access(groups, os.W_OK),
        python=python_minor(),
        base_python=needs.base_python(release),
        has_tree=tree_path(bed.root).exists() if release else False,
        networks=(bed.network,),
        routes=tuple(needs.routes_beside(bed.bridge)) if linux else (),
    )


def judge_bed(facts: BedFacts) -> needs.Shortfall:
    """Everything that stands in the way. Nothing is changed before this says that nothing does."""
    if facts.system != "Linux":
        return needs.Shortfall((f"this is {facts.system}; the hosts need Linux (`lockstep run --local` runs here)",), ())
    missing = [*_missing_powers(facts), *(f"the kernel has no {feature}" for feature in sorted(facts.lacks))]
    missing += needs.taken_networks(facts.networks, facts.routes)
    if facts.base_python and facts.python != facts.base_python:
        missing.append(
            f"the Python of `.venv` is {facts.python}, the hosts have this distribution's {facts.base_python}: "
            f"make setup PYTHON=/usr/bin/python{facts.base_python}"
        )
    packages = {package for command, package in PACKAGES.items() if command not in facts.commands}
    if facts.has_tree:
        packages.discard("debootstrap")
    if facts.distribution in needs.DISTRIBUTIONS:
        return needs.Shortfall(tuple(missing), tuple(sorted(packages)))
    if not facts.has_tree:
        missing.append(f"{facts.distribution or 'this system'} is neither Debian nor Ubuntu, whose packages the hosts' disk is made of")
    missing += [f"install {package} (on Debian and Ubuntu this is done for you)" for package in sorted(packages)]
    return needs.Shortfall(tuple(missing), ())


def _missing_powers(facts: BedFacts) -> list[str]:
    if not facts.is_root:
        return ["it needs root: network namespaces and mounts are made (sudo, or `lockstep run --local`, which needs none)"]
    if facts.groups is None:
        return ["control groups of version 2 are not mounted, which the hosts' systemd needs: mount -t cgroup2 none /sys/fs/cgroup/unified"]
    return [] if facts.groups_writable else [f"{facts.groups} is read-only: control groups can't be made"]


def ensure_bed(bed: BedLayout, say: Callable[[str], None]) -> None:
    """Install what apt has. Raises ConfigError when something else is missing, a line each, before anything is changed."""
    needs.bring("hosts can't be made on this machine:", lambda: judge_bed(observe_bed(bed)), say)
