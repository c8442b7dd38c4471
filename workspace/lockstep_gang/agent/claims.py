"""Claims on the GPUs of this machine: an abstract Unix socket for each, which the kernel gives to one process of all users, and takes back
when it ends.

There is no file, so nothing has rights and nothing is left behind. Whoever connects gets one line that says whose the GPU is, and the
kernel says who sent it.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from types import TracebackType

from lockstep_machine.gpus import CLAIM, gpu_claim
from lockstep_machine.readings import user_name
from lockstep_spec.words import printable_line

BACKLOG = 16
ANSWER_SECONDS = 2.0
"""Longest time that a holder has for its answer: whoever it is, the kernel knows the user."""
TRIES, RETRY_SECONDS = 20, 0.05
"""A holder that ends just now leaves a name that can be taken a moment later."""


class GpuTaken(Exception):
    """Raised when somebody else has claimed a GPU. The message says whose it is, since when, and which process of which user holds it."""


class Claims:
    """GPUs that this process holds until it ends or `release` is called. Raises GpuTaken and OSError, and holds none then."""

    def __init__(self, uuids: Sequence[str], job: str) -> None:
        self._began = time.localtime()
        self._job = job
        self._sockets: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        self._wake, waker = socket.socketpair()
        self._selector.register(waker, selectors.EVENT_READ)
        self._waker = waker
        try:
            for uuid in sorted(set(uuids)):  # in one order: of two that want the same, one gets all
                self._sockets.append(_claimed(uuid))
        except BaseException:
            self._close()
            raise
        for held in self._sockets:
            self._selector.register(held, selectors.EVENT_READ)
        self._answering = threading.Thread(target=self._answer, name="claims", daemon=True)
        self._answering.start()

    def __enter__(self) -> Claims:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def release(self) -> None:
        """Give all of them back. A second call does nothing."""
        if self._answering.is_alive():
            with contextlib.suppress(OSError):
                self._wake.send(b".")
            self._answering.join()
        self._close()

    def _close(self) -> None:
        self._selector.close()
        for each in (*self._sockets, self._wake, self._waker):
            each.close()
        self._sockets = []

    def _answer(self) -> None:
        """Tell whoever connects, until released. Nobody can hold this up: what doesn't fit at once is left out."""
        line = f"job {self._job} of {user_name()} since "
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._waker:
                    return
                try:
                    connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
                    with connection:
                        connection.setblocking(False)
                        connection.send(f"{line}{self._since()}\n".encode())
                except OSError:  # who asked has gone; or there is no descriptor left, and the socket stays readable
                    time.sleep(RETRY_SECONDS)

    def _since(self) -> str:
        """Time of day of this machine; with the date if it isn't of today."""
        today = time.strftime("%Y-%m-%d", time.localtime()) == time.strftime("%Y-%m-%d", self._began)
        return time.strftime("%H:%M" if today else "%Y-%m-%d %H:%M", self._began)


def _claimed(uuid: str) -> socket.socket:
    """Socket that holds a GPU. Raises GpuTaken and OSError."""
    for _ in range(TRIES):
        held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            held.bind(CLAIM + uuid)
            held.listen(BACKLOG)
            held.setblocking(False)
        except OSError as error:
            held.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return held
        holder = holder_of(uuid)
        if holder:
            raise GpuTaken(f"GPU {uuid} of this machine is taken: {holder}")
        time.sleep(RETRY_SECONDS)
    raise GpuTaken(f"GPU {uuid} of this machine is taken, by a process that accepts no connection")


def holder_of(uuid: str) -> str:
    """Words about who holds a GPU: `job demo of ada since 14:02 (process 1234 of ada)`; empty: nobody does, or not yet or no longer."""
    claim = gpu_claim(uuid, ANSWER_SECONDS)
    if claim is None or not claim["pid"]:
        return "" if claim is None else "its holder does not answer"
    return f"{printable_line(claim['words']) or 'its holder says nothing'} (process {claim['pid']} of {claim['user']})"
