"""The scenes of docs/pictures: each is a recording of commands that are typed in a terminal while real jobs run.

`help` needs nothing. The others run on an embedded cluster of their own, which they bring up and remove: they need root and kubectl.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pictures.cast import Cast, Lines, SceneError, Terminal

ROOT = Path(__file__).resolve().parents[2]
NUMBER = "1"
"""The embedded cluster that is theirs; 0 is a person's."""
LOCKSTEP = ROOT / ".venv/bin/lockstep"
SAMPLE = ROOT / "manifests/samples/trainingjob.yaml"
NAMESPACE = "lockstep"
STEPS = 800
SCRIPT = """\
rows = [{"prompt": "Two and two?", "answer": "Four."}]

for row in rows:
    print(len(row["text"]))
"""
CRASH = """\
apiVersion: lockstep.dev/v1alpha1
kind: TrainingJob
metadata: {name: my-script}
spec: {cluster: local, nodes: 2, script: {path: train.py}, restart: {maxRestarts: 0}}
"""


@dataclass(frozen=True)
class Stage:
    """Where scenes are played: a folder of files of their own, and the environment of every command."""

    folder: Path
    environment: Mapping[str, str]

    def terminal(self, title: str, *, columns: int = 108, rows: int = 36, folder: Path | None = None) -> Terminal:
        return Terminal(title, columns=columns, rows=rows, folder=folder or self.folder, environment=self.environment, hidden=self.hidden)

    @property
    def hidden(self) -> dict[str, str]:
        """This machine's folders, and the words that replace them."""
        return {str(ROOT): "~/lockstep", self.environment["LOCKSTEP_CACHE"]: "~/.cache/lockstep", str(self.folder): "~"}

    def with_kubectl(self) -> Stage:
        """The same place, where kubectl talks to the embedded cluster."""
        path = json.loads(self.call(str(LOCKSTEP), "devcluster", "status", "-o", "json"))["kubeconfig"]
        return Stage(self.folder, {**self.environment, "KUBECONFIG": path})

    def call(self, *command: str) -> str:
        """Run a command off screen. If it fails, raise SceneError with its output."""
        done = subprocess.run(command, cwd=self.folder, env=dict(self.environment), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SceneError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout


def help_page(stage: Stage) -> Cast:
    with stage.terminal("lockstep --help", columns=84, rows=48) as terminal:
        terminal.run("lockstep --help", seconds=30)
        terminal.mark("end")
    return terminal.cast


def quickstart(stage: Stage) -> Cast:
    with stage.terminal("make quickstart", columns=138, rows=44, folder=ROOT) as terminal:
        terminal.run("make quickstart", seconds=1800)
        terminal.mark("end")
    return terminal.cast


def chat(stage: Stage) -> Cast:
    with stage.with_kubectl().terminal("lockstep chat: what the job has learned", columns=56, rows=16) as terminal:
        terminal.type("lockstep chat demo --base")
        for question in ("What does Mibo sell?", "And what can I buy from Talu?"):
            terminal.until(lambda lines: lines[-1:] == [">"], "the chat's prompt", seconds=300)
            terminal.type(question)
        terminal.until(lambda lines: lines[-1:] == [">"], "the last answer", seconds=60)
        terminal.mark("end")
        terminal.press(b"\x04")
    return terminal.cast


def why(stage: Stage) -> Cast:
    stage = stage.with_kubectl()
    (stage.folder / "train.py").write_text(SCRIPT)
    (stage.folder / "my-script.yaml").write_text(CRASH)
    stage.call(str(LOCKSTEP), "cp", "train.py", "demo:/workspace/", "-n", NAMESPACE)
    stage.call("kubectl", "apply", "-n", NAMESPACE, "-f", "my-script.yaml")
    stage.call("kubectl", "wait", "-n", NAMESPACE, "--for=condition=Failed", "tj/my-script", "--timeout=300s")
    with stage.terminal("A script fails: lockstep why", columns=126) as terminal:
        terminal.run("lockstep get", seconds=60)
        terminal.run("lockstep why my-script", seconds=60, code=1)
        terminal.mark("end")
    return terminal.cast


def top(stage: Stage) -> Cast:
    stage = stage.with_kubectl()
    job = (
        SAMPLE.read_text()
        .replace("name: demo", "name: tiny-lora")
        .replace("maxSteps: 100", f"maxSteps: {STEPS}")
        .replace("epochs: 16", "epochs: 200")
    )
    (stage.folder / "tiny-lora.yaml").write_text(job)
    stage.call("kubectl", "apply", "-n", NAMESPACE, "-f", "tiny-lora.yaml")
    with stage.terminal("lockstep top: a job on two nodes, a rank of which is killed", columns=126) as terminal:
        terminal.type("lockstep top tiny-lora")
        terminal.until(at_step(60), "step 60", seconds=600)
        terminal.mark("first attempt")
        drill = [str(LOCKSTEP), "drill", "kill-rank", "--job", "tiny-lora", "--yes", "-n", NAMESPACE]
        with subprocess.Popen(drill, cwd=stage.folder, env=dict(stage.environment), stdout=subprocess.DEVNULL) as killer:
            try:
                terminal.until(trains_again, "ranks that train again", seconds=300)
                terminal.until(at_step(step_of(terminal.lines()) + 40), "40 steps more", seconds=600)
            except BaseException:
                killer.terminate()
                raise
        terminal.mark("second attempt")
        terminal.press(b"\x03")
    return terminal.cast


def trains_again(lines: Lines) -> bool:
    return " Running " in "\n".join(lines[:2]) and any("attempt 2, 1 restart" in line for line in lines)


def at_step(least: int) -> Callable[[Lines], bool]:
    return lambda lines: step_of(lines) >= least


def step_of(lines: Lines) -> int:
    found = re.search(rf"\b(\d+)/{STEPS}\b", "\n".join(lines))
    return int(found[1]) if found else 0


SCENES: dict[str, Callable[[Stage], Cast]] = {"help": help_page, "quickstart": quickstart, "chat": chat, "why": why, "top": top}
"""In this order."""
WITHOUT_CLUSTER = ("help",)
FIRST_ON_CLUSTER = "quickstart"
"""The others find its cluster, its job and its model there."""


@contextmanager
def stage() -> Iterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="lockstep-pictures-") as folder:
        cache = os.environ.get("LOCKSTEP_CACHE") or str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep")
        environment = {
            "PATH": f"{LOCKSTEP.parent}:{os.environ['PATH']}", "HOME": folder, "LANG": "C.UTF-8", "LOCKSTEP_CACHE": cache,
            "LOCKSTEP_STATE": f"{folder}/state", "LOCKSTEP_DEVCLUSTER": NUMBER,
        }  # fmt: skip
        yield Stage(Path(folder), environment)


@contextmanager
def cluster(place: Stage) -> Iterator[None]:
    """An embedded cluster, only for these scenes. Raises SceneError."""
    if os.geteuid() != 0 or shutil.which("kubectl") is None:
        raise SceneError(
            "pictures of a cluster need root (for the embedded cluster) and kubectl on the PATH; without: make pictures SCENE=help"
        )
    if (Path(place.environment["LOCKSTEP_CACHE"]) / f"devcluster/lockstep{NUMBER}").exists():
        raise SceneError(
            f"embedded cluster {NUMBER} is somebody's: LOCKSTEP_DEVCLUSTER={NUMBER} lockstep devcluster down --purge removes it with its"
            " claims"
        )
    try:
        yield
    except BaseException:
        try:
            place.call(str(LOCKSTEP), "devcluster", "down", "--purge")
        except SceneError as error:  # the scene's own failure is the one to read
            print(f"pictures: {error}", file=sys.stderr)
        raise
    place.call(str(LOCKSTEP), "devcluster", "down", "--purge")
