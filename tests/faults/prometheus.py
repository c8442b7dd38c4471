"""Prometheus as the distribution has it: promtool, and a server on loopback for as long as a block lasts."""

from __future__ import annotations

import fcntl
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3
import yaml

from lockstep.devcluster.host.processes import TIED
from lockstep.environments import cache_root
from support.clusters.cluster_jobs import until

PACKAGE = "prometheus"


def programs() -> Path:
    """Folder of `prometheus` and `promtool`. The package is unpacked, once for all checkouts, and not installed: that would start a
    service.
    """
    folder = cache_root() / "prometheus" / platform.freedesktop_os_release()["VERSION_CODENAME"]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            draft = folder.with_suffix(".draft")
            draft.mkdir(exist_ok=True)
            subprocess.run(["apt-get", "update", "-qq"], check=True)
            subprocess.run(["apt-get", "download", "-qq", PACKAGE], cwd=draft, check=True)
            for package in draft.glob(f"{PACKAGE}_*.deb"):
                subprocess.run(["dpkg-deb", "--extract", package, draft], check=True)
                package.unlink()
            draft.rename(folder)
    return folder / "usr" / "bin"


def promtool(*arguments: str, folder: Path, check: bool = True) -> str:
    """Run `promtool` in this folder and return what it prints, in its order. Raises AssertionError with that if it fails and `check` is
    set.
    """
    done = subprocess.run(
        [programs() / "promtool", *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0 or not check, done.stdout
    return done.stdout


@dataclass(frozen=True)
class Prometheus:
    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Series that the expression has now. Raises AssertionError with Prometheus' words if it refuses it."""
        return self._get("query", query=expression)["result"]

    def label_values(self, label: str, selector: str) -> list[str]:
        return self._get(f"label/{label}/values", **{"match[]": selector})

    def is_ready(self) -> bool:
        try:
            return urllib3.request("GET", f"{self.url}/-/ready", retries=False).status == 200
        except urllib3.exceptions.HTTPError:
            return False

    def _get(self, path: str, **parameters: str) -> Any:
        reply = urllib3.request("GET", f"{self.url}/api/v1/{path}", fields=parameters)
        assert reply.status == 200, f"{parameters}: {reply.data.decode()}"
        return reply.json()["data"]


@contextmanager
def running_prometheus(folder: Path, port: int, settings: Mapping[str, Any]) -> Iterator[Prometheus]:
    """A server with these settings, whose data and log are in `folder`."""
    (folder / "prometheus.yml").write_text(yaml.safe_dump(dict(settings)))
    command = [
        *TIED, str(programs() / "prometheus"), f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            server = Prometheus(f"http://127.0.0.1:{port}")
            until("Prometheus answers", lambda: server.is_ready() or process.poll() is not None)
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            yield server
        finally:
            process.kill()
