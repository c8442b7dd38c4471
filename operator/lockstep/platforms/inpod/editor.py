"""Server for an editor in a pod or on a host: starts it on loopback, and ends it with the connection that asked for it.

Requests and answers are JSON, one a line. The token comes on standard input and goes into a file that only this user reads: never into
arguments or variables, which others see. Sent as text into whatever image the job has, so: the standard library of Python 3.10.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib
import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

SILENCE_SECONDS = 60.0
"""Seconds without a message after which the laptop counts as gone, whatever its connection says."""
START_SECONDS = 120.0
LISTENS = "0A"
LINES = 20
MODULES = {
    "jupyter": (("jupyterlab", "notebook", "jupyter_server"), "pip install jupyterlab"),
    "tensorboard": (("tensorboard",), "pip install tensorboard"),
    "debug": (("debugpy",), "pip install debugpy"),
}
"""Modules of each kind, of which the first one that is installed counts, and the command that adds it to an image."""


def announce(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def module_of(kind: str) -> str | None:
    return next((name for name in MODULES[kind][0] if importlib.util.find_spec(name) is not None), None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_listening(port: int) -> bool:
    """Return True if a process listens on the port. It is not connected to: a debugger would take that for its editor."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                if state == LISTENS and int(local.rpartition(":")[2], 16) == port:
                    return True
    return False


def private_file(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as file:
        json.dump(content, file)
    return path


def jupyter_command(request: dict[str, Any], module: str, port: int, folder: Path) -> list[str]:
    server = {
        "ip": "127.0.0.1",
        "port": port,
        "port_retries": 0,
        "open_browser": False,
        "root_dir": request["folder"],
        "allow_root": os.geteuid() == 0,
    }
    settings = {"IdentityProvider": {"token": request["token"]}, "ServerApp": server}
    return [sys.executable, "-m", module, f"--config={private_file(folder, 'jupyter_config.json', settings)}"]


def tensorboard_command(request: dict[str, Any], module: str, port: int, folder: Path) -> list[str]:
    settings = private_file(folder, "tensorboard.json", {"token": request["token"], "port": port, "logdir": request["folder"]})
    return [sys.executable, "-c", request["source"], "tensorboard-server", str(settings)]


def debug_command(request: dict[str, Any], module: str, port: int, folder: Path) -> list[str]:
    return [sys.executable, "-m", module, "--listen", f"127.0.0.1:{port}", "--wait-for-client", *request["command"]]


COMMANDS: dict[str, Callable[[dict[str, Any], str, int, Path], list[str]]] = {
    "jupyter": jupyter_command,
    "tensorboard": tensorboard_command,
    "debug": debug_command,
}


def guarded(application: Callable[..., Iterable[bytes]], token: str) -> Callable[..., Iterable[bytes]]:
    """Guard a WSGI application: a request needs ?token=… once; from then on a cookie stands for it."""
    cookie = f"lockstep-{hashlib.sha256(token.encode()).hexdigest()[:8]}"

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        offered = parse_qs(environ.get("QUERY_STRING", "")).get("token", [""])[0]
        if hmac.compare_digest(offered.encode(), token.encode()):
            path = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "/")
            start(
                "302 Found", [("Location", f"/{path.strip('/')}"), ("Set-Cookie", f"{cookie}={token}; Path=/; HttpOnly; SameSite=Strict")]
            )
            return []
        with contextlib.suppress(Exception):  # a cookie that can't be parsed is none
            kept_token = SimpleCookie(environ.get("HTTP_COOKIE", "")).get(cookie)
            if kept_token is not None and hmac.compare_digest(kept_token.value.encode(), token.encode()):
                return application(environ, start)
        start("401 Unauthorized", [("Content-Type", "text/plain")])
        return [b"open the address that `lockstep tensorboard` has printed: it holds the token\n"]

    return answer


def serve_tensorboard(path: str) -> None:
    """Serve TensorBoard behind a token, since it has no authentication of its own.

    Its fast loader is off: that listens on a port that has none either.
    """
    program = importlib.import_module("tensorboard.program")

    settings = json.loads(Path(path).read_text())

    def server(application: Any, flags: Any) -> Any:
        return program.WerkzeugServer(guarded(application, settings["token"]), flags)

    board = program.TensorBoard(server_class=server)
    place = ["--host", "127.0.0.1", "--port", str(settings["port"])]
    board.configure(argv=["tensorboard", "--logdir", settings["logdir"], "--load_fast=false", *place])
    sys.exit(board.main())


class Tail:
    """Last lines that the server has printed."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._text = b""

    def add(self, data: bytes) -> None:
        self._text = (self._text + data)[-16384:]

    def lines(self) -> list[str]:
        text = self._text.decode(errors="replace").replace(self._token, "…")
        return [line for line in text.splitlines() if line.strip()][-LINES:]


def attend(child: subprocess.Popen[bytes], port: int, tail: Tail, echo: bool) -> None:
    """Serve until the child ends, the connection ends, or nothing is heard from the laptop."""
    assert child.stdout is not None  # noqa: S101 (it was made with a pipe)
    ready, heard, begun = False, time.monotonic(), time.monotonic()
    output, orders = child.stdout.fileno(), sys.stdin.fileno()
    while True:
        for source in select.select([output, orders], [], [], 0.2)[0]:
            data = os.read(source, 1 << 16)
            if source == orders:
                if not data or b"end" in data:
                    return
                heard = time.monotonic()
            elif data:
                tail.add(data)
                if echo:
                    os.write(sys.stderr.fileno(), data)
            else:
                announce(ended=child.wait(), said=tail.lines())
                return
        if not ready and is_listening(port):
            ready = True
            announce(port=port)
        if not ready and time.monotonic() - begun > START_SECONDS:
            announce(failed=f"it doesn't listen after {START_SECONDS:.0f} s", said=tail.lines())
            return
        if time.monotonic() - heard > SILENCE_SECONDS:
            return


def end(child: subprocess.Popen[bytes]) -> None:
    """End the child with all that it has started: kernels of notebooks, workers of a script."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=5)


def first_line() -> bytes:
    """Read the first line unbuffered, so that `select` sees what follows."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(sys.stdin.fileno(), 1)
        if not data:
            sys.exit("the request was cut off")
        line += data
    return line


def main() -> None:
    if sys.argv[1:2] == ["tensorboard-server"]:
        serve_tensorboard(sys.argv[2])
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the server ends with it where a connection is lost
    request = json.loads(first_line())
    if not request.get("onHost"):
        os.umask(0o002)  # what is written by a notebook is the group's, as what ranks write in a pod is
    kind = request["kind"]
    module = module_of(kind)
    if module is None:
        names, remedy = MODULES[kind]
        if request.get("onHost"):
            announce(failed=f"{sys.executable} has no {' or '.join(names)}: {sys.executable} -m {remedy}")
            return
        announce(
            failed=f"{sys.executable} of this pod has no {' or '.join(names)}: it belongs into the job's image ({remedy}); for pods of the embedded cluster: make editors"
        )
        return
    folder, port, tail = Path(tempfile.mkdtemp(prefix="lockstep-editor-")), free_port(), Tail(request["token"])
    environment = {**os.environ, "JUPYTER_RUNTIME_DIR": str(folder), "PYTHONUNBUFFERED": "1"}
    try:
        command = COMMANDS[kind](request, module, port, folder)
        child = subprocess.Popen(
            command, cwd=request["cwd"], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            attend(child, port, tail, echo=kind == "debug")
        finally:
            end(child)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
