"""The demo that quickstart trains: a small base model and texts, its steps as they are told, and its result."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.api.errors import ConfigError
from lockstep.platforms.output import put

JOB_FILE = "manifests/samples/trainingjob.yaml"
PROMPT = "Return the"
SAMPLE = "One sample without and with the adapter (a toy model: the loss tells what it has learned, not the words)"
AGAIN = " from the beginning, beside the run that is there"
GENERATE_SECONDS = 600.0


@contextmanager
def step(title: str) -> Iterator[None]:
    """Print one line when a step begins and one when it ends, with its seconds."""
    put(f"==> {title}", flush=True)
    started = time.monotonic()
    yield
    put(f"    {time.monotonic() - started:.1f} s", flush=True)


def demo_folder() -> Path:
    """Make a small base model and texts once, and return their folder in the cache. The trainer's own code makes them, in a process of its own."""
    from lockstep.devcluster.host.layout import cache_root

    folder = cache_root() / "demo" / _demo_key()
    with step("Make the base model and the texts (from the documentation that every Python carries)"):
        command = [sys.executable, "-m", "lockstep_train.demo", "--models", str(folder / "models"), "--datasets", str(folder / "datasets")]
        subprocess.run(command, check=True)
    return folder


def _demo_key() -> str:
    """Name of the demo's folder. Another demo, or another Python, from whose texts it learns, makes another model."""
    package = find_spec("lockstep_train")
    if package is None or not package.submodule_search_locations:
        raise ConfigError("lockstep_train, which makes the demo, is not installed: make setup")
    digest = hashlib.sha256(sys.version.encode())
    for path in sorted(Path(package.submodule_search_locations[0], "demo").glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def generate_command(model: str, adapter: str) -> list[str]:
    """The program that prints one sample without and one with the adapter."""
    return ["python3", "-m", "lockstep_train.generate", "--model", model, "--adapter", adapter, "--prompt", PROMPT]


def print_result(result: dict[str, Any], where: str = "") -> None:
    """Print what came of the training. `where`: words behind the adapter's path."""
    put("", "Complete", f"  eval loss before   {result.get('evalLossBefore')}", f"  eval loss after    {result.get('evalLossAfter')}")
    put(f"  adapter            {result.get('adapter')}{where}")
