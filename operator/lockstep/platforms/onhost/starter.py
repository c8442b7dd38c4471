"""Start the program that standard input describes, and end it when the connection ends.

sshd leaves a program alone when its connection is gone. This process waits beside it, sees that nobody reads its output any more, and ends
it. It also runs on Pythons that are too old for everything else (3.6 or newer), so that there is a sentence for them.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys

MARK = b"\x1elockstep 1\n"
"""First output of a host that can run programs; what stands before it was printed by the login shell."""
NO_PROGRAM = b"\x1elockstep 0\n"
"""Output in place of MARK when there is no such program; its name follows."""
ENDED_255 = b"\x1elockstep 255\n"
"""End of standard error of a program that ended with 255, which is what ssh says when its connection breaks."""
HEAD_DIGITS = 10
SIGNS = (signal.SIGTERM, signal.SIGHUP)
GRACE_SECONDS = 5.0
NOT_THERE = 127


def main() -> None:
    head = json.loads(read_exactly(int(read_exactly(HEAD_DIGITS))).decode())
    words = head["words"]
    if words[0] == "python3" and sys.version_info < (3, 10):
        words[0] = newer_python(head["newer"])
    words[0] = os.path.expanduser(words[0])  # noqa: PTH111
    os.environ.update(head["environment"])
    if not is_program(words[0]):
        os.write(1, NO_PROGRAM + words[0].encode(errors="replace"))
        os._exit(NOT_THERE)
    woken, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking)
    for number in (signal.SIGCHLD, *SIGNS):
        signal.signal(number, lambda *_: None)
    os.write(1, MARK)
    child = os.fork()
    if child == 0:
        become(words)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)  # the child alone reads it, and its end is the reader's end
    code = wait_for(child, woken)
    if code == 255:
        os.write(2, ENDED_255)
    os._exit(code)


def read_exactly(size: int) -> bytes:
    """Bytes of standard input. Ends the process when the connection ends before."""
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            os._exit(1)
        data += piece
    return data


def newer_python(paths: list) -> str:  # type: ignore[type-arg]  # (Python 3.6 has no list[str])
    """First of these Pythons that is there; else the host's own, which is too old."""
    paths = [os.path.expanduser(path) for path in paths]  # noqa: PTH111
    return next(filter(is_program, paths), "python3")


def is_program(name: str) -> bool:
    """Return True if there is such a program, by its path or in one of PATH's folders."""
    paths = [name] if "/" in name else [os.path.join(folder, name) for folder in os.get_exec_path()]  # noqa: PTH118 (no import that costs time)
    return any(os.path.isfile(path) and os.access(path, os.X_OK) for path in paths)  # noqa: PTH113


def become(words: list) -> None:  # type: ignore[type-arg]  # (Python 3.6 has no list[str])
    """Replace this process, in a session of its own, by the program."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ, *SIGNS):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(words[0], words)  # noqa: S606 (a list of words, no shell)
    except OSError as error:
        os.write(2, "{}: {}\n".format(words[0], error.strerror).encode(errors="replace"))  # noqa: UP032
    os._exit(NOT_THERE)


def wait_for(child: int, woken: int) -> int:
    """Exit code of the child, which is ended when nobody reads standard output any more, or this process is told to end."""
    poller = select.poll()
    poller.register(1, 0)  # (errors are always told: the other end was closed)
    poller.register(woken, select.POLLIN)
    asked = False
    while True:
        waiting = int(GRACE_SECONDS * 1000) if asked else None
        events = poller.poll(waiting)
        heard = os.read(woken, 4096) if any(number == woken for number, _ in events) else b""
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        if not asked and (any(number == 1 for number, _ in events) or any(sign in heard for sign in SIGNS)):
            asked = True
            poller.unregister(1)
            end(child, signal.SIGTERM)
        elif asked and not events:
            end(child, signal.SIGKILL)


def end(child: int, number: int) -> None:
    """Send the signal to the child and what it started, or to the child alone before it has a session of its own."""
    for send in (os.killpg, os.kill):
        try:
            return send(child, number)
        except OSError:
            continue
    return None


if __name__ == "__main__":
    main()
