"""The cluster's own programs, built from Go modules once and cached by a hash of their inputs.

Multus, the CNI plugin that attaches further networks to pods, is built for clusters with rails only.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.api.errors import Failed
from lockstep.devcluster.host.processes import TIED, locked

SOURCE = Path(__file__).parent / "kube"
MULTI_CALL = "lockstep-kube"
PAUSE = "pause"
VERSION_PACKAGES = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
MULTUS_SOURCE = Path(__file__).parent / "cni"
MULTUS_PACKAGE = "gopkg.in/k8snetworkplumbingwg/multus-cni.v4/cmd/multus"
MULTUS = "multus"
MULTUS_OPTIONS = ("-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags", "-s -w")
CNI_PLUGINS = ("bridge", "host-local", "loopback", "portmap")
"""Plugins of the nodes' pod network and the rails; they stand beside Multus, in the folder where containerd looks for plugins."""
REQUIREMENT = re.compile(r"^\tk8s\.io/kubernetes (v\d+\.\d+\.\d+)$", re.MULTILINE)


def kubernetes_version() -> str:
    """The Kubernetes release that go.mod names, as v1.34.4."""
    match = REQUIREMENT.search((SOURCE / "go.mod").read_text())
    if match is None:
        raise ValueError(f"{SOURCE / 'go.mod'}: requires no k8s.io/kubernetes")
    return match.group(1)


def build_options() -> list[str]:
    """Return options that give the same bytes from any folder: no paths, no commit in them. Kubernetes built as a module doesn't know its
    own version.
    """
    version = kubernetes_version()
    major, minor, _ = version.removeprefix("v").split(".")
    values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitCommit": "", "gitTreeState": ""}
    names = [f"-X {package}.{key}={value}" for package in VERSION_PACKAGES for key, value in values.items()]
    return ["-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags", " ".join(["-s -w", *names])]


class BuildError(Failed):
    """The cluster's programs could not be built."""


def source_key(source: Path, options: Sequence[str]) -> str:
    """Name of what is built from these files with these options: the same inputs give the same."""
    digest = hashlib.sha256(" ".join(options).encode())
    for path in sorted(source.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(source)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def folder(root: Path) -> Path:
    return root / "devcluster" / "bin" / source_key(SOURCE, build_options())


def is_built(root: Path) -> bool:
    return (folder(root) / MULTI_CALL).exists() and (folder(root) / PAUSE).exists()


def build(root: Path, say: Callable[[str], None]) -> Path:
    """The folder with `lockstep-kube` and the static `pause`; minutes when cold, nothing when cached.

    Raises:
        BuildError: the Go command failed; the message has its last words and names its log.
    """
    target = folder(root)
    with locked(target / "lock"):
        if not (target / PAUSE).exists():
            go_build(target / PAUSE, "./pause", build_options(), SOURCE, {"CGO_ENABLED": "0"})
        if not (target / MULTI_CALL).exists():
            say("building Kubernetes from its Go modules (minutes the first time, cached afterwards)")
            go_build(target / MULTI_CALL, ".", build_options(), SOURCE, {})
    return target


def build_multus(root: Path, plugins: Path, say: Callable[[str], None]) -> Path:
    """The folder with `multus` and copies of the plugins that it calls; under a minute when cold, nothing when cached.

    Raises:
        BuildError: the Go command failed; the message has its last words and names its log.
    """
    target = root / "devcluster" / "cni" / source_key(MULTUS_SOURCE, MULTUS_OPTIONS)
    target.mkdir(parents=True, exist_ok=True)
    with locked(target.parent / f"{target.name}.lock"):
        for name in CNI_PLUGINS:
            if not (target / name).exists():
                shutil.copy2(plugins / name, target / f"{name}.tmp")
                (target / f"{name}.tmp").replace(target / name)
        if not (target / MULTUS).exists():
            say("building Multus from its Go module (under a minute the first time, cached afterwards)")
            go_build(target / MULTUS, MULTUS_PACKAGE, list(MULTUS_OPTIONS), MULTUS_SOURCE, {"CGO_ENABLED": "0"})
    return target


def go_build(output: Path, package: str, options: list[str], source: Path, environment: dict[str, str]) -> None:
    """Run the Go command in `source`, which it only reads; its output (a line for every module it fetches) goes to a log beside the binary.
    Raises BuildError.
    """
    temporary, log = output.with_suffix(".tmp"), output.with_suffix(".log")
    command = [*TIED, "go", "build", *options, "-o", str(temporary), package]
    with log.open("wb") as output_log:
        own = {**os.environ, "GOWORK": "off", **environment}  # a go.work above would take the modules for its own
        done = subprocess.run(command, cwd=source, env=own, stdout=output_log, stderr=output_log, check=False)
    if done.returncode != 0:
        words = log.read_text(errors="replace").strip().splitlines()[-3:]
        raise BuildError(f"{' '.join(command)} ended with {done.returncode}: {' | '.join(words)} (see {log})")
    temporary.replace(output)
