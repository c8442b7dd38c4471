"""Store of reference runs, kept between test runs: what a subject is compared with, or starts from."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rank_harness import HERE, SOURCES, TESTS

from lockstep.environments import cache_root

Reference = Callable[..., Path]
VARIABLES = ("ATEN_", "ONEDNN_", "DNNL_", "MKL_", "TORCH_", "OMP_")  # by which kernels are chosen, too
PACKAGES = ("torch", "deepspeed", "transformers", "peft")
KEYS_MAX = 3  # so that checkouts that alternate each find theirs


def digest(paths: Iterable[Path]) -> str:
    whole = hashlib.sha256()
    for path in sorted(paths):
        whole.update(f"{path.relative_to(TESTS.parent)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()


def cpu_flags() -> str:
    """Return the CPU's instructions, by which kernels are chosen, and sums rounded."""
    return next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))), "")


def surroundings() -> str:
    """Return all outside of the checkout that decides a number's last bits."""
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith(VARIABLES))
    return repr((cpu_flags(), variables, [version(package) for package in PACKAGES]))


class References:
    """Store of folders that hold for one state of the trainer, its packages, the functions that ranks run, and their surroundings. Never
    change what is in them.
    """

    def __init__(self) -> None:
        sources = [*SOURCES.rglob("*.py"), *HERE.glob("*.py"), HERE.parent / "conftest.py", *(TESTS.parent / "requirements").glob("*.lock")]
        key = hashlib.sha256(f"{digest(sources)} {surroundings()}".encode()).hexdigest()[:16]
        root = cache_root() / "references"
        self._folder = root / key
        root.mkdir(parents=True, exist_ok=True)
        with (root / "lock").open("w") as choosing:
            fcntl.flock(choosing, fcntl.LOCK_EX)  # else another test run could remove a lock that is opened here, and not yet taken
            self._used = (root / f"{key}.lock").open("w")
            fcntl.flock(self._used, fcntl.LOCK_SH)
            os.utime(self._used.fileno())
            self._folder.mkdir(exist_ok=True)
            for old in sorted(root.glob("*.lock"), key=lambda path: path.stat().st_mtime_ns)[:-KEYS_MAX]:
                self._remove_unused(old)

    def _remove_unused(self, old: Path) -> None:
        """Remove the folder of another key with its lock, unless a test run uses it."""
        with old.open("a") as lock, suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old.with_suffix(""), ignore_errors=True)
            old.unlink()

    def get(self, name: str, description: Any, make: Callable[[Path], None]) -> Path:
        """Return the folder that `make` fills, made by the first that asks for this description; whole, or not there."""
        mark = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:12]
        folder = self._folder / f"{name}-{mark}"
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                part = folder.with_suffix(".part")
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir()
                make(part)
                part.rename(folder)
        return folder

    def close(self) -> None:
        self._used.close()
