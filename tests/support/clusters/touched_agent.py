"""An agent of ssh whose keys want a touch, for the tests of logins that wait."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

from support.clusters.bed_hosts import eventually

SIGN = 13
"""Message by which an agent is asked for a signature (SSH_AGENTC_SIGN_REQUEST)."""


def answers(path: Path) -> bool:
    """Return True if an agent listens there; its socket is there a moment before it does."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


class TouchedAgent:
    """A real ssh-agent behind a door that passes no signature before its key is touched."""

    def __init__(self, folder: Path, identity: Path) -> None:
        self.path, self.touched, self.asked = folder / "agent", threading.Event(), threading.Event()
        behind = folder / "real"
        self._agent = subprocess.Popen(["ssh-agent", "-D", "-a", behind], stdout=subprocess.DEVNULL)
        assert eventually(lambda: answers(behind))
        subprocess.run(["ssh-add", "-q", identity], env={**os.environ, "SSH_AUTH_SOCK": str(behind)}, check=True)
        self._behind = behind
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(str(self.path))
        self._door.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=self._pass, args=(self._door.accept()[0],), daemon=True).start()

    def _pass(self, client: socket.socket) -> None:
        with suppress(OSError, struct.error), client, socket.socket(socket.AF_UNIX) as real:
            real.connect(str(self._behind))
            while True:
                message = self._message(client)
                if message[4] == SIGN:
                    self.asked.set()
                    self.touched.wait()
                real.sendall(message)
                client.sendall(self._message(real))

    @staticmethod
    def _message(stream: socket.socket) -> bytes:
        head = stream.recv(4, socket.MSG_WAITALL)
        return head + stream.recv(*struct.unpack(">I", head), socket.MSG_WAITALL)

    def close(self) -> None:
        self._door.close()
        self._agent.terminate()
        self._agent.wait()
        self.touched.set()
