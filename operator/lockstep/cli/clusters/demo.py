"""The demo that quickstart trains: a small base model and chats, its steps as they are told, and its result."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.assets import asset, package
from lockstep.cli.shared.folders import from_here
from lockstep.cli.shared.ownversion import ROOT
from lockstep.environments import cache_root
from lockstep.platforms.files.transfer import TransferProgress
from lockstep.platforms.files.transfer import put as send
from lockstep.platforms.output import put
from lockstep.platforms.places.values import Use
from lockstep.programs import output_of

if TYPE_CHECKING:
    from lockstep.platforms.places.backend import Job
    from lockstep.platforms.places.values import Volume

QUESTIONS = "Ask the base model and the tuned one, in a wording that no row of the data has"
AGAIN = " from the beginning, beside the run that is there"
EXISTS = "import os, sys; print(os.path.exists(sys.argv[1]))"
ASK_SECONDS = 600.0
BASE = "/workspace/models/tiny-base"


@contextmanager
def step(title: str) -> Iterator[None]:
    """Print one line when a step begins and one when it ends, with its seconds."""
    put(f"==> {title}", flush=True)
    started = time.monotonic()
    yield
    put(f"    {time.monotonic() - started:.1f} s", flush=True)


def demo_folder() -> Path:
    """Make a small base model and chats once, and return their folder in the cache. The trainer's own code makes them, in a process of its
    own.
    """
    digest = hashlib.sha256(sys.version.encode())  # another demo, or another Python, from whose texts it learns, makes another model
    for path in sorted((package("lockstep_train") / "demo").glob("*.py")):
        digest.update(path.read_bytes())
    folder = cache_root() / "demo" / digest.hexdigest()[:12]
    with step("Make the base model and the chats (from documentation that every Python carries, and invented facts)"):
        command = [sys.executable, "-m", "lockstep_train.demo", "--models", str(folder / "models"), "--datasets", str(folder / "datasets")]
        subprocess.run(command, check=True)
    return folder


def sample_file(name: str = "trainingjob") -> Path:
    """Return the path of a sample job file, as one would type it here."""
    return from_here(asset(f"manifests/samples/{name}.yaml"))


async def send_demo(opened: AbstractAsyncContextManager[Volume], demo: Path, job: str) -> bool:
    """Copy the model and the chats onto a volume. Return True if it has a run of the job. Raises Failed."""
    async with opened as volume:
        roots = [volume.workspace, volume.datasets]
        await send(volume.place, demo / "models", f"{volume.workspace}/models", roots, TransferProgress(lambda: None))
        await send(volume.place, demo / "datasets/demo.jsonl", f"{volume.datasets}/demo.jsonl", roots, TransferProgress(lambda: None))
        there = await output_of(volume.place, [*volume.place.python, "-c", EXISTS, volume.run_folder(job)])
        return there.strip() == b"True"


def ask_command(model: str, adapter: str) -> list[str]:
    """Return the trainer's program that asks the base model and the tuned one the same questions."""
    return ["-m", "lockstep_train.demo.ask", "--model", model, "--adapter", adapter]


async def answers(job: Job) -> str:
    """Return the answers of the base model and of the adapter, written beside the job's ranks."""
    async with job.volume(0, lambda line: None, Use.MODEL) as volume:
        ask = ask_command(volume.path(BASE), volume.path(job.status["result"]["adapter"]))
        printed = await output_of(volume.place, [*volume.place.python, *ask], seconds=ASK_SECONDS)
    return printed.decode(errors="replace")


def print_result(result: dict[str, Any], commands: str, where: str) -> None:
    """Print what came of the training, and `commands` to go on with, which a checkout has in its .venv. `where`: where the adapter is."""
    put("", "Complete", f"  eval loss before   {result.get('evalLossBefore')}", f"  eval loss after    {result.get('evalLossAfter')}")
    path = [f"  export PATH={sys.prefix}/bin:$PATH"] if Path(sys.prefix) == ROOT / ".venv" else []
    put(f"  adapter            {result.get('adapter')} ({where})", "", "Next:", *path, *commands.splitlines())
