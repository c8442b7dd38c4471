"""Needs of the embedded cluster and of the bed of hosts on their machine: observed first, judged purely, and only then installed."""

from __future__ import annotations

import ipaddress
import json
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.api.errors import ConfigError
from lockstep.devcluster import binary, images
from lockstep.devcluster.host import cgroups
from lockstep.devcluster.host.layout import Layout
from lockstep.devcluster.hosts.layout import BedLayout
from lockstep.devcluster.hosts.tree import tree_path
from lockstep.devcluster.node import cni_folder
from lockstep_spec import VERSION

DISTRIBUTIONS = ("debian", "ubuntu")
DISTRIBUTION_PYTHON = {"bookworm": "3.11", "trixie": "3.13", "noble": "3.12", "jammy": "3.10"}
NAMESPACES = ("net", "mnt", "pid", "ipc", "uts")
OLDEST_GO = (1, 21)
"""It fetches the newer Go that kube/go.mod asks for; older ones don't know how."""

NAT = ("iptables", "-w", "-t", "nat", "-A")
PROBES: dict[str, tuple[str, ...]] = {
    "veth links (CONFIG_VETH)": ("ip", "link", "add", "lsprobe0", "type", "veth", "peer", "name", "lsprobe1"),
    "bridges (CONFIG_BRIDGE)": ("ip", "link", "add", "lsprobe0", "type", "bridge"),
    "NAT for iptables (masquerade, comment)": (*NAT, "POSTROUTING", "-m", "comment", "--comment", "probe", "-j", "MASQUERADE"),
    "iptables match `statistic`": (*NAT, "PREROUTING", "-m", "statistic", "--mode", "random", "--probability", "0.5", "-j", "ACCEPT"),
    "iptables match `conntrack`": ("iptables", "-w", "-A", "FORWARD", "-m", "conntrack", "--ctstate", "INVALID", "-j", "DROP"),
}
"""Kernel features, and a command that only works with them. Each runs in a network namespace that ends with it."""


@dataclass(frozen=True)
class Purpose:
    """The embedded cluster or the bed of hosts: what it needs, and its words in sentences about that."""

    refusal: str
    needs: str
    have: str
    disk: str
    image: Callable[[Path], Path]
    """The path of its cached disk, under the cache's root."""
    packages: Mapping[str, str]
    """Packages by the command that each brings."""
    namespaces: tuple[str, ...]
    probes: Mapping[str, tuple[str, ...]]
    groups: Callable[[], Path | None]
    """The folder in which its control groups are made; None: those of version 2 aren't mounted."""
    is_built: Callable[[Path], bool] = lambda root: True
    """Tells whether its programs are in the cache's root."""


CNI = "bridge, host-local and portmap of CNI"
_COMMON = {"debootstrap": "debootstrap", "ip": "iproute2", "nsenter": "util-linux", "setpriv": "util-linux"}
CLUSTER = Purpose(
    "the embedded cluster can't run here:", "the embedded cluster needs", "pods have", "the base image", images.base_path,
    {
        **_COMMON, "containerd": "containerd", "runc": "runc", "iptables": "iptables", "conntrack": "conntrack", "sysctl": "procps",
        CNI: "containernetworking-plugins",
    },
    NAMESPACES, PROBES, lambda: cgroups.ROOT, binary.is_built,
)  # fmt: skip
HOSTS = Purpose(
    "hosts can't be made on this machine:", "the hosts need", "the hosts have", "the hosts' disk", tree_path,
    {**_COMMON, "unshare": "util-linux", "ssh": "openssh-client", "ssh-keygen": "openssh-client"},
    (*NAMESPACES, "cgroup"), {name: command for name, command in PROBES.items() if command[0] == "ip"}, cgroups.unified,
)  # fmt: skip


@dataclass(frozen=True)
class MachineFacts:
    """The machine as it was observed. A feature that can't be tried yet (its tool isn't installed) is not in `lacks`."""

    system: str
    is_root: bool
    distribution: str
    commands: frozenset[str]
    lacks: frozenset[str]
    groups: Path | None
    """Folder in which control groups are made; None: those of version 2 aren't mounted."""
    groups_writable: bool
    python: str
    base_python: str | None
    has_image: bool
    networks: tuple[str, ...]
    routes: tuple[tuple[str, str], ...]
    """Destination and device of every route that isn't its own."""
    go: tuple[int, ...] | None = None
    is_built: bool = True


@dataclass(frozen=True)
class Shortfall:
    """`missing`: why it can't be done, one sentence each; `install`: packages that would mend the rest."""

    missing: tuple[str, ...]
    install: tuple[str, ...]


def observe(purpose: Purpose, layout: Layout | BedLayout) -> MachineFacts:
    """Look at the machine, and change nothing that outlives the look."""
    linux, root = platform.system() == "Linux", os.geteuid() == 0
    release = platform.freedesktop_os_release() if linux and Path("/etc/os-release").exists() else {}
    groups, is_built = purpose.groups(), purpose.is_built(layout.root)
    routes = json.loads(_output("ip", "-json", "route") or "[]") if linux else []
    return MachineFacts(
        system=platform.system(),
        is_root=root,
        distribution=release.get("ID", ""),
        commands=frozenset(name for name in purpose.packages if shutil.which(name) or (name == CNI and cni_folder() is not None)),
        lacks=frozenset(_kernel_lacks(purpose)) if linux and root else frozenset(),
        groups=groups,
        groups_writable=groups is not None and os.access(groups, os.W_OK),
        python=sysconfig.get_python_version(),
        base_python=DISTRIBUTION_PYTHON.get(release.get("VERSION_CODENAME", ""))
        or _output("/usr/bin/python3", "-c", "import sysconfig; print(sysconfig.get_python_version())").strip()
        or None,
        has_image=purpose.image(layout.root).exists() if release else False,
        networks=layout.networks,
        routes=tuple((r["dst"], r.get("dev", "")) for r in routes if r["dst"] != "default" and r.get("dev") != layout.bridge),
        go=None if is_built else _go_version(),
        is_built=is_built,
    )


def _output(*command: str) -> str:
    """Output of the command; empty when it isn't there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _go_version() -> tuple[int, ...] | None:
    match = re.search(r"\bgo(\d+)\.(\d+)", _output("go", "version"))
    return (int(match[1]), int(match[2])) if match else None


def _kernel_lacks(purpose: Purpose) -> list[str]:
    """Features that the kernel lacks, `overlay` among them. Needs root."""
    own = {path.name for path in Path("/proc/self/ns").iterdir()}
    lacking = [f"namespace `{name}`" for name in purpose.namespaces if name not in own]
    loaded = "overlay" in Path("/proc/filesystems").read_text().split()
    if not loaded and subprocess.run(["modprobe", "--dry-run", "overlay"], capture_output=True, check=False).returncode != 0:
        lacking.append("file system `overlay` (CONFIG_OVERLAY_FS)")
    for feature, command in purpose.probes.items():
        if shutil.which(command[0]) and subprocess.run(["unshare", "--net", *command], capture_output=True, check=False).returncode != 0:
            lacking.append(feature)
    return lacking


def judge(purpose: Purpose, facts: MachineFacts) -> Shortfall:
    """Everything that stands in the way. Nothing is changed before this says that nothing does."""
    if facts.system != "Linux":
        return Shortfall((f"this is {facts.system}; {purpose.needs} Linux (`lockstep run --local` runs here)",), ())
    missing = [
        *_missing_rights(facts),
        *(f"the kernel has no {feature}" for feature in sorted(facts.lacks)),
        *(
            f"the network {network} is taken: this machine has a route to {destination} through {device}"
            for network in map(ipaddress.ip_network, facts.networks)
            for destination, device in facts.routes
            if network.overlaps(ipaddress.ip_network(destination))
        ),
    ]
    if not facts.is_built and (facts.go is None or facts.go < OLDEST_GO):
        problem = "there is no Go" if facts.go is None else f"Go {facts.go[0]}.{facts.go[1]} is too old"
        missing.append(f"{problem} to build Kubernetes with: install 1.24 or newer as https://go.dev/doc/install says")
    if facts.base_python and facts.python != facts.base_python:
        missing.append(
            f"Lockstep runs on Python {facts.python}, {purpose.have} this distribution's {facts.base_python}: install it with `uv tool"
            f" install --force --python /usr/bin/python{facts.base_python} dist/lockstep_trainer-{VERSION}-py3-none-any.whl`, or in a clone"
            f" with `make setup PYTHON=/usr/bin/python{facts.base_python}`"
        )
    packages = {package for command, package in purpose.packages.items() if command not in facts.commands}
    if facts.has_image:
        packages.discard("debootstrap")
    if facts.distribution in DISTRIBUTIONS:
        return Shortfall(tuple(missing), tuple(sorted(packages)))
    if not facts.has_image:
        missing.append(f"{facts.distribution or 'this system'} is neither Debian nor Ubuntu, whose packages {purpose.disk} is made of")
    missing += [f"install {package} (on Debian and Ubuntu this is done for you)" for package in sorted(packages)]
    return Shortfall(tuple(missing), ())


def _missing_rights(facts: MachineFacts) -> list[str]:
    if not facts.is_root:
        return ["it needs root: network namespaces and mounts are made (sudo, or `lockstep run --local`, which needs none)"]
    if facts.groups is None:
        return ["control groups of version 2 are not mounted, which the hosts' systemd needs: mount -t cgroup2 none /sys/fs/cgroup/unified"]
    return [] if facts.groups_writable else [f"{facts.groups} is read-only: control groups can't be made"]


def ensure(purpose: Purpose, layout: Layout | BedLayout, say: Callable[[str], None]) -> None:
    """Install what apt has. Raises ConfigError when something else is missing, a line each, before anything is changed."""
    shortfall = judge(purpose, observe(purpose, layout))
    _refuse(purpose.refusal, shortfall.missing)
    if shortfall.install:
        install(shortfall.install, say)
        _refuse(purpose.refusal, judge(purpose, observe(purpose, layout)).missing)  # what could not be tried without their tools


def install(packages: Iterable[str], say: Callable[[str], None]) -> None:
    """Packages of the distribution, by apt. Raises ConfigError."""
    say(f"installing the packages {' '.join(packages)} (apt-get)")
    _apt("update", "-qq")
    _apt("install", "-y", "-qq", "--no-install-recommends", *packages)


def _refuse(refusal: str, missing: tuple[str, ...]) -> None:
    if missing:
        raise ConfigError(refusal, *(f"  - {line}" for line in missing))


def _apt(*arguments: str) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(["apt-get", *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise ConfigError(f"apt-get {' '.join(arguments)} failed: {lines[-1] if lines else done.returncode}")
