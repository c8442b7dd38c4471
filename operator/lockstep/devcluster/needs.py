"""Needs of the embedded cluster on its machine: observed first, judged purely, and only then installed."""

from __future__ import annotations

import ipaddress
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.api.errors import ConfigError
from lockstep.devcluster import binary, images
from lockstep.devcluster.host.layout import Layout
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
    "setpriv": "util-linux",
    "sysctl": "procps",
}
CNI_PACKAGE = "containernetworking-plugins"
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
class MachineFacts:
    """The machine as it was observed. A feature that can't be tried yet (its tool isn't installed) is not in `lacks`."""

    system: str
    is_root: bool
    distribution: str
    commands: frozenset[str]
    has_cni: bool
    go: tuple[int, ...] | None
    is_built: bool
    lacks: frozenset[str]
    cgroup_writable: bool
    python: str
    base_python: str | None
    has_base_image: bool
    wanted_networks: tuple[str, ...] = ()
    routes: tuple[tuple[str, str], ...] = ()
    """Destination and device of every route that isn't the cluster's own."""


@dataclass(frozen=True)
class Shortfall:
    """`missing`: why it can't be done, one sentence each; `install`: packages that would mend the rest."""

    missing: tuple[str, ...]
    install: tuple[str, ...]


def observe(layout: Layout) -> MachineFacts:
    """Look at the machine, and change nothing that outlives the look."""
    linux, root = platform.system() == "Linux", os.geteuid() == 0
    release = images.os_release() if linux and Path("/etc/os-release").exists() else {}
    return MachineFacts(
        system=platform.system(),
        is_root=root,
        distribution=release.get("ID", ""),
        commands=frozenset(name for name in PACKAGES if shutil.which(name)),
        has_cni=cni_folder() is not None,
        go=_go_version(),
        is_built=binary.is_built(layout.root),
        lacks=frozenset(kernel_lacks(NAMESPACES, PROBES)) if linux and root else frozenset(),
        cgroup_writable=os.access("/sys/fs/cgroup", os.W_OK),
        python=python_minor(),
        base_python=base_python(release),
        has_base_image=images.base_path(layout.root).exists() if release else False,
        wanted_networks=(layout.node_network, layout.pod_network, layout.service_network),
        routes=tuple(routes_beside(layout.bridge)) if linux else (),
    )


def _output(*command: str) -> str:
    """Output of the command; empty when it isn't there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _go_version() -> tuple[int, ...] | None:
    match = re.search(r"\bgo(\d+)\.(\d+)", _output("go", "version"))
    return (int(match[1]), int(match[2])) if match else None


def base_python(release: Mapping[str, str]) -> str | None:
    """Minor version of the distribution's own Python; None if it has none."""
    return DISTRIBUTION_PYTHON.get(release.get("VERSION_CODENAME", "")) or _system_python()


def _system_python() -> str | None:
    version = _output("/usr/bin/python3", "-c", "import sysconfig; print(sysconfig.get_python_version())").strip()
    return version or None


def kernel_lacks(namespaces: Iterable[str], probes: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Features of these that the kernel lacks, and `overlay`. Needs root."""
    own = {path.name for path in Path("/proc/self/ns").iterdir()}
    lacking = [f"namespace `{name}`" for name in namespaces if name not in own]
    loaded = "overlay" in Path("/proc/filesystems").read_text().split()
    if not loaded and subprocess.run(["modprobe", "--dry-run", "overlay"], capture_output=True, check=False).returncode != 0:
        lacking.append("file system `overlay` (CONFIG_OVERLAY_FS)")
    for feature, command in probes.items():
        if shutil.which(command[0]) and subprocess.run(["unshare", "--net", *command], capture_output=True, check=False).returncode != 0:
            lacking.append(feature)
    return lacking


def routes_beside(bridge: str) -> list[tuple[str, str]]:
    """Destination and device of every route of this machine but the default one and the bridge's."""
    routes = json.loads(_output("ip", "-json", "route") or "[]")
    return [(r["dst"], r.get("dev", "")) for r in routes if r["dst"] != "default" and r.get("dev") != bridge]


def judge(facts: MachineFacts) -> Shortfall:
    """Everything that stands in the way. Nothing is changed before this says that nothing does."""
    if facts.system != "Linux":
        return Shortfall((f"this is {facts.system}; the embedded cluster needs Linux (`lockstep run --local` runs here)",), ())
    missing = [
        *_missing_rights(facts),
        *(f"the kernel has no {feature}" for feature in sorted(facts.lacks)),
        *taken_networks(facts.wanted_networks, facts.routes),
    ]
    if not facts.is_built and (facts.go is None or facts.go < OLDEST_GO):
        problem = "there is no Go" if facts.go is None else f"Go {facts.go[0]}.{facts.go[1]} is too old"
        missing.append(f"{problem} to build Kubernetes with: install 1.24 or newer as https://go.dev/doc/install says")
    if facts.base_python and facts.python != facts.base_python:
        missing.append(
            f"the Python of `.venv` is {facts.python}, pods have this distribution's {facts.base_python}: "
            f"make setup PYTHON=/usr/bin/python{facts.base_python}"
        )
    packages = _packages(facts)
    if facts.distribution in DISTRIBUTIONS:
        return Shortfall(tuple(missing), packages)
    if not facts.has_base_image:
        missing.append(f"{facts.distribution or 'this system'} is neither Debian nor Ubuntu, whose packages the base image is made of")
    missing += [f"install {package} (on Debian and Ubuntu this is done for you)" for package in packages]
    return Shortfall(tuple(missing), ())


def _missing_rights(facts: MachineFacts) -> list[str]:
    if not facts.is_root:
        return ["it needs root: network namespaces and mounts are made (sudo, or `lockstep run --local`, which needs none)"]
    return [] if facts.cgroup_writable else ["/sys/fs/cgroup is read-only: control groups can't be made"]


def taken_networks(wanted: Iterable[str], routes: Iterable[tuple[str, str]]) -> list[str]:
    """Sentences about networks that this machine already has a route to."""
    return [
        f"the network {network} is taken: this machine has a route to {destination} through {device}"
        for network in map(ipaddress.ip_network, wanted)
        for destination, device in routes
        if network.overlaps(ipaddress.ip_network(destination))
    ]


def _packages(facts: MachineFacts) -> tuple[str, ...]:
    """Packages to install; debootstrap only when there is an image to make."""
    needed = {package for command, package in PACKAGES.items() if command not in facts.commands}
    if facts.has_base_image:
        needed.discard("debootstrap")
    return tuple(sorted(needed if facts.has_cni else needed | {CNI_PACKAGE}))


def ensure(layout: Layout, say: Callable[[str], None]) -> None:
    """Install what apt has; refuse, before anything is changed, when something else is missing.

    Raises:
        ConfigError: what is missing, a line each.
    """
    bring("the embedded cluster can't run here:", lambda: judge(observe(layout)), say)


def bring(refusal: str, look: Callable[[], Shortfall], say: Callable[[str], None]) -> None:
    """Install what the look says. Raises ConfigError with `refusal` and a line for each thing that is missing, before anything is changed."""
    shortfall = look()
    _refuse(refusal, shortfall.missing)
    if shortfall.install:
        install(shortfall.install, say)
        _refuse(refusal, look().missing)  # what could not be tried without their tools


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
