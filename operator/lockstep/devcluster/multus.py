"""Multus, the CNI plugin that attaches further networks to pods: built from its Go module once, and cached like the cluster's programs.

It is for clusters with rails only: nobody else waits for its build.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from lockstep.devcluster import binary

SOURCE = Path(__file__).parent / "cni"
PACKAGE = "gopkg.in/k8snetworkplumbingwg/multus-cni.v4/cmd/multus"
PROGRAM = "multus"
OPTIONS = ("-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags", "-s -w")
PLUGINS = ("bridge", "host-local", "loopback", "portmap")
"""What the nodes' pod network and the rails are made with; they stand beside Multus, in the folder where containerd looks for plugins."""


def source_key() -> str:
    digest = hashlib.sha256(" ".join(OPTIONS).encode())
    for path in sorted(SOURCE.glob("*")):
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def folder(root: Path) -> Path:
    return root / "devcluster" / "cni" / source_key()


def build(root: Path, plugins: Path, say: Callable[[str], None]) -> Path:
    """The folder with `multus` and copies of the plugins that it calls; under a minute when cold, nothing when cached.

    Raises:
        BuildError: the Go command failed; the message has its last words and names its log.
    """
    target = folder(root)
    target.mkdir(parents=True, exist_ok=True)
    with (target.parent / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in PLUGINS:
            if not (target / name).exists():
                shutil.copy2(plugins / name, target / f"{name}.tmp")
                (target / f"{name}.tmp").replace(target / name)
        if not (target / PROGRAM).exists():
            say("building Multus from its Go module (under a minute the first time, cached afterwards)")
            binary.go_build(target / PROGRAM, PACKAGE, list(OPTIONS), SOURCE, {"CGO_ENABLED": "0"})
    return target
