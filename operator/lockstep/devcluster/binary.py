"""The cluster's own programs, built from Go modules once and cached by a hash of their inputs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

SOURCE = Path(__file__).parent / "kube"
MULTI_CALL = "lockstep-kube"
PAUSE = "pause"


def source_key() -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCE.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(SOURCE)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def folder(root: Path) -> Path:
    return root / "devcluster" / "bin" / source_key()


def is_built(root: Path) -> bool:
    return (folder(root) / MULTI_CALL).exists() and (folder(root) / PAUSE).exists()


def build(root: Path, say: Callable[[str], None]) -> Path:
    """The folder with `lockstep-kube` and the static `pause`; minutes when cold, nothing when cached.

    Raises:
        subprocess.CalledProcessError: the Go compiler's own error, which it has printed.
    """
    target = folder(root)
    target.mkdir(parents=True, exist_ok=True)
    with (target / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / PAUSE).exists():
            _go(target / PAUSE, "./pause", {"CGO_ENABLED": "0"})
        if not (target / MULTI_CALL).exists():
            say("building Kubernetes from its Go modules (minutes the first time, cached afterwards)")
            _go(target / MULTI_CALL, ".", {})
    return target


def _go(output: Path, package: str, environment: dict[str, str]) -> None:
    temporary = output.with_suffix(".tmp")
    command = ["go", "build", "-trimpath", "-mod=readonly", "-ldflags", "-s -w", "-o", str(temporary), package]
    subprocess.run(command, cwd=SOURCE, env={**os.environ, **environment}, check=True)
    temporary.replace(output)
