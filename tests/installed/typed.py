"""What a person types in an installed Lockstep, line after line, and what must come of it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from installed.stub import Cluster, a_cluster
from lockstep.devcluster.host.layout import NUMBER
from support.clusters.own_cluster import NOBODYS

WAIT_SECONDS = 300.0
NOT_ROOT = ("unshare", "--user", "--map-user=1000")
SERVER = """
import gc, importlib, json, os, pkgutil, runpy, signal, socket, sys
import lockstep
for module in pkgutil.walk_packages(lockstep.__path__, "lockstep."):
    if not module.name.startswith(("lockstep.platforms.operator", "lockstep.devcluster")):
        importlib.import_module(module.name)
gc.freeze()
signal.signal(signal.SIGCHLD, lambda *_: os.waitpid(-1, os.WNOHANG))
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
listening.listen()
print("ready", flush=True)
while True:
    peer, _ = listening.accept()
    if os.fork() == 0:
        break
    peer.close()
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
listening.close()
typed, streams, _, _ = socket.recv_fds(peer, 1 << 20, 3)
child = os.fork()
if child:
    peer.sendall(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
    os._exit(0)
peer.close()
for number, stream in enumerate(streams):
    os.dup2(stream, number)
    os.close(stream)
sys.argv, here, environment = json.loads(typed)
os.chdir(here)
os.environ.clear()
os.environ.update(environment)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Program that has imported the wheel's modules and the packages that they need, in an installed environment, and runs the installed
script for each line in a fork: imports are four fifths of most lines.
"""
BESIDE = (
    r"lockstep: \S+ has no \S+: going on with \S+",
    r"lockstep: installing the packages of \S+ into .+",
    r"lockstep: another process installs packages into .+",
    r"lockstep: files in .+ can't be locked .+",
    r"lockstep: (\w+ )+on .+, namespace \S+",
    r"lockstep: (\w+ )+in workspace .+",
    r"lockstep: \d+ nodes are asked for, .+",
    r"note: .*",
    r"warning: .*",
    r"… .*",
    r"  - .*",
)
"""Lines on standard error beside the sentence that ends a verb: where it goes on, where it acts, warnings, waiting, and the parts of a
list.
"""


@dataclass(frozen=True)
class Line:
    """`out`, `err`: texts that are printed. `refusal`: part of the one sentence that ends it."""

    words: str
    out: Sequence[str] = ()
    err: Sequence[str] = ()
    code: int = 0
    refusal: str = ""
    files: Sequence[str] = ()
    """Patterns of files that are there afterwards, below the folder where it is typed."""
    given: str = ""
    """On standard input."""
    program: str = "lockstep"
    environment: Mapping[str, str] = field(default_factory=dict)
    as_root: bool = True
    fresh: bool = False
    """Typed as a process of its own, which imports by itself."""

    def check(self, done: subprocess.CompletedProcess[str], here: Path) -> None:
        said = f"{self.program} {self.words} → {done.returncode}\n{done.stdout}\n--\n{done.stderr}"
        assert done.returncode == self.code, said
        for text in self.out:
            assert text in done.stdout, f"no {text!r} on standard output: {said}"
        for text in self.err:
            assert text in done.stderr, f"no {text!r} on standard error: {said}"
        for pattern in self.files:
            assert list(here.glob(pattern)), f"no {pattern}: {said}"
        assert "Traceback" not in done.stdout + done.stderr, said
        assert "checkout" not in done.stderr, said
        if self.refusal:
            sentences = [line for line in done.stderr.splitlines() if not re.fullmatch("|".join(BESIDE), line)]
            assert len(sentences) == 1 and sentences[0].startswith("lockstep: ") and self.refusal in done.stderr, said


def refused(words: str, refusal: str, code: int = 2, **options: Any) -> Line:
    """A line that ends in one sentence, since what it needs isn't there."""
    assert refusal, f"{words}: which sentence ends it?"
    return Line(words, refusal=refusal, code=code, **options)


@dataclass(frozen=True)
class Story:
    """Lines typed one after the other in one folder, empty but for `files`, by a person with an empty home."""

    name: str
    lines: Sequence[Line]
    files: Mapping[str, str] = field(default_factory=dict)
    cluster: bool = False
    """Serve a cluster: $KUBECONFIG, and the cluster file of `lab`."""
    pods: bool = False
    """The cluster has the pods of a job that runs."""
    changes: Sequence[tuple[str, str, Any]] = ()
    """What the cluster was asked to change."""
    takes: int = 1
    """Seconds, roughly."""
    locks: Sequence[str] = ("cli",)

    def __lt__(self, other: Story) -> bool:
        return self.name < other.name


@dataclass(frozen=True)
class Ended:
    """A line that was typed, its end, and the folder where."""

    typed: Sequence[tuple[Line, subprocess.CompletedProcess[str]]]
    here: Path
    changed: Sequence[tuple[str, str, Any]]


@dataclass(frozen=True)
class Installed:
    """An environment that has the wheel, and the machine's cache, which spares 6 GB of packages."""

    folder: Path
    cache: Path

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Have the process that lines are forked from."""
        command = [str(self.folder / "bin/python"), "-P", "-c", SERVER, str(self._socket)]
        options: dict[str, Any] = {"cwd": self.folder, "env": self.variables(self.folder), "process_group": 0}
        with subprocess.Popen(command, stdout=subprocess.PIPE, **options) as server:
            try:
                assert server.stdout is not None and server.stdout.readline() == b"ready\n"
                yield
            finally:
                os.killpg(server.pid, signal.SIGKILL)  # with a line that has not ended

    @property
    def _socket(self) -> Path:
        return self.folder / "lines"

    def variables(self, home: Path) -> dict[str, str]:
        """Return the environment variables of a person with this home."""
        xdg = {f"XDG_{name}_HOME": str(home / name.lower()) for name in ("CONFIG", "STATE", "DATA", "CACHE")}
        return {
            "PATH": f"{self.folder / 'bin'}:{os.defpath}",
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "NO_COLOR": "1",
            "LOCKSTEP_CACHE": str(self.cache),
            NUMBER: str(NOBODYS),
            **xdg,
        }

    def command(self, *words: str, as_root: bool = True) -> list[str]:
        """Return the argument list of a program of this environment; a root's without its rights if that is wished."""
        return [*(NOT_ROOT if not as_root and os.geteuid() == 0 else ()), str(self.folder / "bin" / words[0]), *words[1:]]

    def type(self, line: Line, here: Path, home: Path, more: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        command = self.command(line.program, *shlex.split(line.words), as_root=line.as_root)
        environment = {**self.variables(home), **more, **line.environment}
        if line.fresh or not line.as_root:
            return subprocess.run(
                command, cwd=here, env=environment, input=line.given, capture_output=True, text=True, check=False, timeout=WAIT_SECONDS
            )
        return self._forked(command, here, environment, line.given)

    def _forked(self, command: Sequence[str], here: Path, environment: Mapping[str, str], given: str) -> subprocess.CompletedProcess[str]:
        with socket.socket(socket.AF_UNIX) as server, ExitStack() as stack:
            streams = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)]
            streams[0].write(given)
            streams[0].seek(0)
            server.settimeout(WAIT_SECONDS)
            server.connect(str(self._socket))
            typed = json.dumps([command, str(here), environment]).encode()
            socket.send_fds(server, [typed], [stream.fileno() for stream in streams])
            code = int(server.recv(16))
            for stream in streams:
                stream.seek(0)
            return subprocess.CompletedProcess(command, code, streams[1].read(), streams[2].read())


def tell(story: Story, installed: Installed, folder: Path) -> Ended:
    """Type the lines of a story, up to the first that doesn't end as it should."""
    here, home = folder / "here", folder / "home"
    here.mkdir()
    home.mkdir()
    for name, text in story.files.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
        if name.startswith("bin/"):
            (here / name).chmod(0o755)
    with ExitStack() as stack:
        more, stub = {"PATH": f"{installed.folder / 'bin'}:{here / 'bin'}:{os.defpath}"}, Cluster()
        if story.cluster:
            stub, kubeconfig = stack.enter_context(a_cluster(folder / "cluster", with_pods=story.pods))
            more["KUBECONFIG"] = str(kubeconfig)
            (here / "clusters").mkdir(exist_ok=True)
            stated = f"name: lab, namespace: team, platform: kubernetes, api: '{stub.url.partition('//')[2]}'"
            (here / "clusters/lab.yaml").write_text(f"cluster: {{{stated}}}\nstorage: {{mode: rwx}}\n")
        typed = []
        for line in story.lines:
            typed.append((line, installed.type(line, here, home, more)))
            if typed[-1][1].returncode != line.code:
                break
    return Ended(typed, here, stub.changed)
