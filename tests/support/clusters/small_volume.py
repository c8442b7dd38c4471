"""A claim's folder of the embedded cluster on a disk of its own, small enough to fill: ext4 in a file, seen by all nodes alike."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lockstep.devcluster.host import processes
from lockstep.devcluster.host.layout import Layout


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def node_processes(layout: Layout, nodes: int) -> list[int]:
    """containerd of every node: it holds the mounts that the node's pods get."""
    found = [processes.running(layout.daemons, f"{layout.node(number).name}-containerd") for number in range(nodes)]
    return [daemon.pid for daemon in found if daemon is not None]


@contextmanager
def small_volume(layout: Layout, nodes: int, folder: Path, image: Path, size_bytes: int) -> Iterator[None]:
    """`folder`, a claim's on this machine, is the small disk for every pod that starts from now on."""
    with image.open("wb") as file:
        file.truncate(size_bytes)
    _run("mkfs.ext4", "-q", "-m", "0", "-E", "root_owner=1000:1000", str(image))
    with ExitStack() as at_end:
        device = _run("losetup", "--find", "--show", str(image))
        at_end.callback(_run, "losetup", "--detach", device)
        for pid in node_processes(layout, nodes):
            enter = ("nsenter", f"--target={pid}", "--mount")
            _run(*enter, "mount", "-t", "ext4", device, str(folder))
            at_end.callback(_run, *enter, "umount", "--lazy", str(folder))
            _run(*enter, "chmod", "777", str(folder))
        yield
