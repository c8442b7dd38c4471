"""The operator as a process that a test kills, pauses and starts again, many times a minute.

Its modules are imported once, by a process that forks for every start: an operator that was killed is gone, with all it knew, and the
next one is there in a fraction of a second. `python tests/support/clusters/operator_process.py` is that process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[3]


class OperatorProcess:
    """`environment` has the operator's settings; what it logs goes to `log`."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        paths = f"{SOURCES / 'operator'}:{SOURCES / 'workspace'}"
        self._log, self._path = log.open("ab"), log
        self._forks = subprocess.Popen(
            [sys.executable, __file__], env={**os.environ, **environment, "PYTHONPATH": paths},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip
        self.pid: int | None = None
        self.ends: list[str] = []
        """Last line that each wrote which ended by itself."""

    def start(self) -> None:
        """End the one that runs, and start another."""
        self.kill()
        self._forks.stdin.write(b"start\n")
        self._forks.stdin.flush()
        self.pid = int(self._forks.stdout.readline())

    def revive(self) -> None:
        """Restart, as a kubelet would, an operator that ended by itself (because it lost its lease on a busy machine, say)."""
        if self.pid is not None and not Path(f"/proc/{self.pid}").exists():
            self.ends.append(self._path.read_text(errors="replace").rstrip().rpartition("\n")[2])
            self.start()

    def kill(self) -> None:
        """Kill it with SIGKILL, if it runs. Safe from any thread."""
        pid, self.pid = self.pid, None
        if pid is not None:
            self._send(pid, signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        assert self.pid is not None
        self._send(self.pid, number)

    def _send(self, pid: int, number: signal.Signals) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return

    def close(self) -> None:
        self.kill()
        self._forks.stdin.close()
        self._forks.stdout.close()
        self._forks.wait(60)
        self._log.close()


def _run() -> None:
    from lockstep.platforms.operator.operator import Settings
    from lockstep.platforms.operator.replica import serve

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stop = asyncio.Event()
    asyncio.run(serve(Settings.from_environment(dict(os.environ)), stop))


def _forks() -> None:
    import kopf  # noqa: F401 (imported before the forks)

    from lockstep.platforms.operator import replica  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # killed ones leave nothing behind
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                _run()
            except BaseException:
                logging.exception("the operator ended")
            finally:
                os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(name)s %(message)s")
    logging.getLogger("kopf").setLevel(logging.WARNING)
    _forks()
