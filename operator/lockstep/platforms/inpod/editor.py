"""Server for an editor in a pod or on a host: starts it on loopback, and ends it with the connection that asked for it.

Requests and answers are JSON, one a line. The token comes on standard input and goes into a file that only this user reads: never into
arguments or variables, which others see. Sent as text into whatever image the job has, so: the standard library of Python 3.10.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.platforms.inpod.gate import Gate, GuardServer, relay

SILENCE_SECONDS = 60.0
"""Seconds without a message after which the laptop counts as gone, whatever its connection says."""
START_SECONDS = 120.0
LINES = 20
MODULES = {
    "jupyter": (("jupyterlab", "notebook", "jupyter_server"), "jupyterlab"),
    "tensorboard": (("tensorboard",), "tensorboard"),
    "debug": (("debugpy",), "debugpy"),
}
"""Modules of each kind, of which the first one that is installed counts, and the package that has it."""
CODE_PROGRAMS = ("code-server", "openvscode-server", "code")
"""Programs that serve VS Code to a browser, of which the first one that is found counts."""
PROGRAM_END_SECONDS = 4.0
PORT = "port.json"
PR_SET_PDEATHSIG = 1


def announce(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def code_program() -> str | None:
    """Path of the first of CODE_PROGRAMS that is on the PATH, or in the bin/ of an environment that this Python imports from."""
    beside = [str(Path(path).parents[2] / "bin") for path in sys.path if path.endswith("/site-packages")]
    places = os.pathsep.join((os.environ.get("PATH", os.defpath), *beside))
    return next((found for name in CODE_PROGRAMS if (found := shutil.which(name, path=places))), None)


def lacking(kind: str, *, on_host: bool) -> str:
    """Return what is missing for a server of this kind, and how to get it."""
    if kind == "vscode":
        remedy = (
            "unpack one of its releases below /workspace, and put its bin on the PATH of the job (spec.env)" if on_host else
            "install one in the job's image (lockstep build trainer --arg CODE_SERVER=ADDRESS --arg CODE_SERVER_SHA256=CHECKSUM), or put"
            " one on the PATH of the job (spec.env); "
            "an installed Lockstep's embedded cluster has none (docs/how-to/editors.md)"
        )  # fmt: skip
        return f"{'this host' if on_host else 'this pod'} has no {' or '.join(CODE_PROGRAMS)} on its PATH: {remedy}"
    names, package = MODULES[kind]
    if on_host:
        return f"{sys.executable} has no {' or '.join(names)}: on this host, {installer()} {package}"
    return (
        f"{sys.executable} of this pod has no {' or '.join(names)}: install it in the job's image (pip install {package}); an installed"
        " Lockstep's embedded cluster has only TensorBoard (docs/how-to/editors.md)"
    )


def installer() -> str:
    """Return the command that adds packages to this Python. Environments of `hosts setup` have no pip: uv made them, and lies beside
    them.
    """
    if importlib.util.find_spec("pip") is not None:
        return f"{sys.executable} -m pip install"
    data = Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "lockstep"
    uv = max(data.glob("uv/*/uv"), key=lambda path: path.stat().st_mtime, default="uv")
    return f"{uv} pip install --python {sys.executable}"


def private_file(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as file:
        json.dump(content, file)
    return path


def jupyter_command(request: dict[str, Any], module: str, at: str, folder: Path) -> list[str]:
    """Command of Jupyter. Its kernels would send what notebooks print to whoever connects to their ports, so they have sockets, too."""
    server = {
        "sock": at,
        "open_browser": False,
        "root_dir": request["folder"],
        "allow_root": os.geteuid() == 0,
        "local_hostnames": [request["name"]],
    }
    provider = {"token": "", "cookie_options": {"httponly": True, "samesite": "Strict"}}
    settings = {"IdentityProvider": provider, "ServerApp": server, "KernelManager": {"transport": "ipc"}}
    return [sys.executable, "-m", module, f"--config={private_file(folder, 'jupyter_config.json', settings)}"]


def tensorboard_command(request: dict[str, Any], module: str, at: str, folder: Path) -> list[str]:
    return [sys.executable, "-c", request["source"], "tensorboard-server", at, request["folder"]]


def code_command(request: dict[str, Any], program: str, at: str, folder: Path) -> list[str]:
    name = Path(program).name
    if name == "code-server":  # (it writes a configuration with a password where it finds none)
        config = private_file(folder, "code-server.yaml", {"auth": "none"})
        options = ["--config", str(config), "--auth", "none", "--socket", at, "--socket-mode", "600"]
        return [program, *options, "--disable-telemetry", "--disable-update-check"]
    listening = ["--socket-path", at, "--without-connection-token"]
    return [program, *listening] if name == "openvscode-server" else [program, "serve-web", *listening, "--accept-server-license-terms"]


def debug_command(request: dict[str, Any], module: str, at: str, folder: Path) -> list[str]:
    settings = private_file(folder, "debug.json", {"socket": at, "command": request["command"]})
    return [sys.executable, "-c", request["source"], "debug-server", str(settings)]


COMMANDS: dict[str, Callable[[dict[str, Any], str, str, Path], list[str]]] = {
    "jupyter": jupyter_command,
    "tensorboard": tensorboard_command,
    "vscode": code_command,
    "debug": debug_command,
}
"""Command line of each kind, for a program that listens at a socket in a private folder, so it needs no token."""


def guarded(request: dict[str, Any], command: list[str], at: str, folder: Path) -> list[str]:
    """Return the command of the guard, which starts the program of that command."""
    settings = {**{key: request[key] for key in ("token", "name", "kind")}, "socket": at, "command": command}
    return [sys.executable, "-c", request["source"], "guard", str(private_file(folder, "guard.json", settings))]


def serve_guarded(path: str) -> None:
    """Serve a program behind a token. Only this user reaches the program's socket; this process checks every request first, at a port
    that it takes and names itself: one that was chosen beforehand could be another user's by now, who would get the token.
    """
    settings = json.loads(Path(path).read_text())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which the program gets, too, and ends by it first
    with GuardServer(0, Gate(settings["token"], settings["kind"], settings["name"]), settings["socket"]) as guard:
        child = subprocess.Popen(settings["command"], stdin=subprocess.DEVNULL, preexec_fn=end_with_parent)  # noqa: PLW1509 (no threads yet)
        try:
            while not connects(settings["socket"]):
                if (code := child.poll()) is not None:
                    sys.exit(code or "it ended before it listened")
                time.sleep(0.1)
            guard.server_activate()
            private_file(Path(path).parent, "port.new", {"port": guard.server_address[1]}).rename(Path(path).with_name(PORT))
            threading.Thread(target=guard.serve_forever, daemon=True).start()
            sys.exit(child.wait())
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=PROGRAM_END_SECONDS)


def connects(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def serve_debugged(path: str) -> None:
    """Run a script that waits for its debugger at a socket that only this user reaches. debugpy asks its clients for no token, so it
    listens on no port: pydevd, the part of it that runs with the script, gets the connection instead of making one.
    """
    settings = json.loads(Path(path).read_text())
    cli: Any = importlib.import_module("debugpy.server.cli")
    pydevd: Any = importlib.import_module("pydevd")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(settings["socket"])
    Path(settings["socket"]).chmod(0o600)
    listener.listen(1)

    def connected(*_: object) -> socket.socket:
        with listener:
            return listener.accept()[0]

    pydevd.start_client = connected
    # Its children would look for a port, so they run without a debugger.
    sys.argv = ["debugpy", "--connect", "127.0.0.1:1", "--configure-subProcess", "False", "--wait-for-client", *settings["command"]]
    cli.main()


def pipe(at: str) -> None:
    """Pass standard input on to a socket, or to a port of loopback, and what comes from there to standard output, until that ends."""
    with socket.socket(socket.AF_INET if at.isdecimal() else socket.AF_UNIX) as program:
        try:
            program.connect(("127.0.0.1", int(at)) if at.isdecimal() else at)
        except OSError as error:
            sys.exit(f"no script waits for a debugger at {at}: {error.strerror}")
        threading.Thread(target=relay, args=(lambda size: os.read(sys.stdin.fileno(), size), program), daemon=True).start()
        while data := program.recv(1 << 16):
            os.write(sys.stdout.fileno(), data)


def serve_tensorboard(at: str, logs: str) -> None:
    """Serve TensorBoard at a socket. Its fast loader is off: that listens on a port, and asks nobody for a token."""
    program: Any = importlib.import_module("tensorboard.program")

    def server_bind(server: Any) -> None:
        socketserver.TCPServer.server_bind(server)
        server.server_name, server.server_port = "localhost", 0  # (HTTPServer takes them from the address, which has none)

    parts = {"server_bind": server_bind, "get_url": lambda _: "http://localhost:0/"}
    board = program.TensorBoard(server_class=type("Server", (program.WerkzeugServer,), parts))
    board.configure(argv=["tensorboard", "--logdir", logs, "--load_fast=false", "--host", f"unix://{at}", "--port", "0"])
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


def attend(child: subprocess.Popen[bytes], tail: Tail, there: Path, place: Callable[[], dict[str, Any]], echo: bool) -> None:
    """Serve until the child ends, the connection ends, or nothing is heard from the laptop, which is told the `place` once `there` is."""
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
        if not ready and there.exists():
            ready = True
            announce(**place())
        if not ready and time.monotonic() - begun > START_SECONDS:
            announce(failed=f"it doesn't listen after {START_SECONDS:.0f} s", said=tail.lines())
            return
        if time.monotonic() - heard > SILENCE_SECONDS:
            return


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent dies, since a killed parent can't clean up."""
    with contextlib.suppress(AttributeError, ImportError, OSError):  # (Linux, and a Python with ctypes)
        importlib.import_module("ctypes").CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


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


PARTS: dict[str, Callable[..., None]] = {
    "tensorboard-server": serve_tensorboard,
    "guard": serve_guarded,
    "debug-server": serve_debugged,
    "pipe": pipe,
}
"""Other programs that this text is, by their first argument."""


def main() -> None:
    if sys.argv[1:]:
        return PARTS[sys.argv[1]](*sys.argv[2:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the server ends with it where a connection is lost
    request = json.loads(first_line())
    if not request.get("onHost"):
        os.umask(0o002)  # what is written by a notebook is the group's, as what ranks write in a pod is
    kind = request["kind"]
    module = code_program() if kind == "vscode" else next(filter(importlib.util.find_spec, MODULES[kind][0]), None)
    if module is None:
        announce(failed=lacking(kind, on_host=bool(request.get("onHost"))), lacks=True)
        return
    folder, tail = Path(tempfile.mkdtemp(prefix="lockstep-editor-")), Tail(request["token"])
    at = str(folder / "program.sock")
    environment = {**os.environ, "JUPYTER_RUNTIME_DIR": str(folder), "PYTHONUNBUFFERED": "1"}
    if not os.access(os.environ.get("HOME", "/"), os.W_OK):  # so that the editor has a place for settings and extensions
        environment["HOME"] = str(folder)
    try:
        command = COMMANDS[kind](request, module, at, folder)
        if kind != "debug":
            command = guarded(request, command, at, folder)
        child = subprocess.Popen(
            command, cwd=request["cwd"], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=end_with_parent,  # noqa: PLW1509 (there are no threads yet)
        )  # fmt: skip
        try:
            if kind == "debug":
                attend(child, tail, Path(at), lambda: {"socket": at}, echo=True)
            else:
                attend(child, tail, folder / PORT, lambda: json.loads((folder / PORT).read_text()), echo=False)
        finally:
            end(child)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
