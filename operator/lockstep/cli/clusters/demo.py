"""The demo that quickstart trains: a small base model and texts, its steps as they are told, and its result."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.assets import asset, package
from lockstep.cli.shared.folders import from_here
from lockstep.cli.shared.ownversion import ROOT
from lockstep.environments import cache_root
from lockstep.platforms.output import put

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
    """Make a small base model and texts once, and return their folder in the cache. The trainer's own code makes them, in a process of its
    own.
    """
    digest = hashlib.sha256(sys.version.encode())  # another demo, or another Python, from whose texts it learns, makes another model
    for path in sorted((package("lockstep_train") / "demo").glob("*.py")):
        digest.update(path.read_bytes())
    folder = cache_root() / "demo" / digest.hexdigest()[:12]
    with step("Make the base model and the texts (from the documentation that every Python carries)"):
        command = [sys.executable, "-m", "lockstep_train.demo", "--models", str(folder / "models"), "--datasets", str(folder / "datasets")]
        subprocess.run(command, check=True)
    return folder


def sample_file(name: str = "trainingjob") -> Path:
    """Return the path of a sample job file, as one would type it here."""
    return from_here(asset(f"manifests/samples/{name}.yaml"))


def generate_command(model: str, adapter: str) -> list[str]:
    """The program that prints one sample without and one with the adapter."""
    return ["python3", "-m", "lockstep_train.generate", "--model", model, "--adapter", adapter, "--prompt", PROMPT]


def print_result(result: dict[str, Any], commands: str, where: str = "") -> None:
    """Print what came of the training, and `commands` to go on with, which a checkout has in its .venv. `where`: words behind the adapter's
    path.
    """
    put("", "Complete", f"  eval loss before   {result.get('evalLossBefore')}", f"  eval loss after    {result.get('evalLossAfter')}")
    path = [f"  export PATH={sys.prefix}/bin:$PATH"] if Path(sys.prefix) == ROOT / ".venv" else []
    put(f"  adapter            {result.get('adapter')}{where}", "", "Next:", *path, *commands.splitlines())
