"""`python3 /lockstep/agent.pyz run|stop|env`: what people type in a pod of a dev environment. Its agent passes it on to all nodes."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import select
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep_spec.exits import FAILED, INTERRUPTED
from lockstep_spec.words import printable_line

VERBS = ("run", "stop", "env")
SOCKET = "/lockstep/agent.sock"
USAGE = 2
READ_BYTES = 65536
QUIET_SECONDS = 10.0
"""Time without a line of any rank or of Lockstep after which the caller hears why."""
OWN = "[lockstep]"


class AgentLost(Exception):
    """There is no agent, or it has gone. The message is for a person."""


def main(arguments: Sequence[str]) -> int:
    """The exit code: of `run` that of the rank that failed first, 130 once it was interrupted."""
    options = _parse(arguments)
    try:
        connection = _connect(os.environ.get("LOCKSTEP_SOCKET", SOCKET))
    except AgentLost as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return FAILED
    with connection:
        try:
            return Conversation(connection, getattr(options, "until_eof", False)).hold(_request(options))
        except BrokenPipeError:  # nobody reads what ranks print (`| head`)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return INTERRUPTED
        except (AgentLost, OSError) as error:
            print(f"lockstep: {error if isinstance(error, AgentLost) else 'the agent has gone'}", file=sys.stderr)
            return FAILED


def _connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        reason = (
            "nothing of an Interactive job runs here, or its agent is still starting"
            if isinstance(error, FileNotFoundError)
            else error.strerror
        )
        raise AgentLost(f"no agent answers at {path}: {reason}") from None
    return connection


def _request(options: argparse.Namespace) -> dict[str, Any]:
    if options.verb != "run":
        return {"verb": options.verb, "by": _who(None)}
    return {
        "verb": "run", "command": options.command, "folder": str(Path(options.chdir or ".").absolute()), "by": _who(options.by),
        "detached": options.detach,
    }  # fmt: skip


def _who(name: str | None) -> str:
    if name:
        return name
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        return "a shell"


class Conversation:
    """One request, and everything that comes back until it is over."""

    def __init__(self, connection: socket.socket, until_eof: bool) -> None:
        self._connection = connection
        self._interrupts = 0
        self._quiet_seconds = 0.0
        self._until_eof = until_eof
        self._rest = b""
        self._woken, self._waking = os.pipe()

    def hold(self, request: dict[str, Any]) -> int:
        signal.signal(signal.SIGINT, lambda *_: self._interrupt())
        os.set_blocking(self._waking, False)
        signal.set_wakeup_fd(self._waking)  # (a signal just before select() would else be handled only after it, which may be never)
        self._send(request)
        waits = request["verb"] == "run"
        while True:
            for answer in self._answers(QUIET_SECONDS if waits else None):
                waits = waits and all(line.startswith(OWN) for line in answer.get("lines", ()))
                code = _print_answer(answer)
                if code is not None:
                    return code

    def _send(self, value: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(value).encode() + b"\n")

    def _interrupt(self) -> None:
        """Handle Ctrl-C: once lets ranks save, twice kills them, three times doesn't wait for it."""
        self._interrupts += 1
        if self._interrupts > 2:
            raise SystemExit(INTERRUPTED)
        how = "asking all ranks to stop; once more kills them" if self._interrupts == 1 else "killing all ranks"
        print(f"\n[lockstep] {how}", file=sys.stderr, flush=True)
        self._send({"interrupt": True})

    def _answers(self, patience: float | None) -> list[dict[str, Any]]:
        """Answers that have come. After `patience` seconds of nothing one line says so, since a script that imports much prints nothing for
        a while.
        """
        sources: list[Any] = [self._connection, self._woken, *([sys.stdin.fileno()] if self._until_eof else [])]
        ready, _, _ = select.select(sources, [], [], patience)
        if not ready and patience is not None:
            self._quiet_seconds += patience
            why = "importing torch and DeepSpeed can take as long; a rank's output comes as soon as it prints"
            print(f"{OWN} no rank has printed anything for {self._quiet_seconds:.0f} s: {why}", file=sys.stderr, flush=True)
            return []
        self._quiet_seconds = 0.0
        if self._woken in ready:
            os.read(self._woken, READ_BYTES)
        if sources[2:] and sources[2] in ready:
            self._take_input(sources[2])
        if self._connection not in ready:
            return []
        data = self._connection.recv(READ_BYTES)
        if not data:
            raise AgentLost("the agent has gone, and the run with it: it was told to end, or it crashed")
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _take_input(self, descriptor: int) -> None:
        """Read input that comes from a laptop by exec: a `c` is a Ctrl-C there, the end of input a lost connection. Anything else keeps it
        alive.
        """
        data = os.read(descriptor, READ_BYTES)
        if not data:
            raise SystemExit(INTERRUPTED)
        for _ in range(data.count(b"c")):
            self._interrupt()


def _print_answer(answer: dict[str, Any]) -> int | None:
    """Print an answer. Returns the exit code once the request is over."""
    for line in answer.get("lines", ()):
        print(printable_line(line))
    for name, value in sorted(answer.get("environment", {}).items()):
        if name.isascii() and name.isidentifier():  # Kubernetes lets others be made, which a shell would take for commands
            print(f"export {name}={shlex.quote(value)}")
    sys.stdout.flush()
    if "exitCode" not in answer:
        return None
    if answer["message"]:
        print(f"[lockstep] {printable_line(answer['message'])}", file=sys.stderr, flush=True)
    return int(answer["exitCode"])


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="agent.pyz", description="Runs programs on all nodes of a dev environment.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="start a script on all nodes, and show what every rank prints", description=_RUN)
    run.add_argument("--detach", action="store_true", help="return at once: the run goes on when this shell closes (`stop` ends it)")
    run.add_argument("--chdir", metavar="FOLDER", help="folder to run in, on every node (default: this one)")
    run.add_argument("--by", help=argparse.SUPPRESS)
    run.add_argument("--until-eof", action="store_true", help=argparse.SUPPRESS)
    run.add_argument("command", nargs="*", metavar="SCRIPT [ARGUMENTS…]", help="a .py file, -m module, or a program")
    verbs.add_parser("stop", help="stop the run on all nodes; a second time kills it")
    verbs.add_parser("env", help='print the variables of a rank on this node, for use as: eval "$(… env)"')
    own, command = _divided(arguments)
    options = parser.parse_args(own)
    options.command = command
    if options.verb == "run" and not command:
        run.error("name what to run: a .py file, -m module, or a program")
    return options


def _divided(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own words, and those of what is to run, which begin with the first that is no option of ours, with `-m`, or after `--`."""
    at = 1
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] not in ("--", "-m"):
        at += 2 if arguments[at] in ("--chdir", "--by") else 1
    return list(arguments[:at]), list(arguments[at:])[arguments[at : at + 1] == ["--"] :]


_RUN = "Every rank of every node runs it in torchrun's environment. Ctrl-C stops all; the exit code is that of the rank that failed first."
