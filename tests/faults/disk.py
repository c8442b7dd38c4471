"""A disk whose power can be cut: ext4 in a file, mounted where no other process sees it.

EXT4_IOC_SHUTDOWN without a flush of the journal stops the file system at once: what the journal and the data blocks hold at that moment
is all that the next mount finds, as after a power loss.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

_CLONE_NEWNS = 0x20000
_EXT4_IOC_SHUTDOWN, _NO_LOG_FLUSH = 0x8004587D, 2
_NEEDS = {"mkfs.ext4": "e2fsprogs", "losetup": "mount", "mount": "mount", "umount": "mount"}
SIZE_BYTES = 8 << 20


class NoLoopDisk(Exception):
    """This machine can't give us such a disk; the message says what it lacks."""


def missing() -> str | None:
    """What this machine lacks, with what to do; None when all is there."""
    if os.geteuid() != 0:
        return "mounting needs root: run this as root"
    absent = sorted({package for command, package in _NEEDS.items() if shutil.which(command) is None})
    if absent:
        return f"a command is missing: apt-get install {' '.join(absent)}"
    if not Path("/dev/loop-control").exists():
        return "the kernel has no loop devices (/dev/loop-control): modprobe loop"
    return None


def hide_mounts() -> None:
    """Give this process and its children mounts of their own: they are gone with the last of them, whatever happens."""
    problem = missing()
    if problem is not None:
        raise NoLoopDisk(problem)
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
        raise NoLoopDisk(f"mounts can't be hidden: {os.strerror(ctypes.get_errno())}")
    _run("mount", "--make-rprivate", "/")


class Disk:
    """One image, mounted at `mount`; `pristine` is what `reset` goes back to. Only after hide_mounts()."""

    def __init__(self, folder: Path) -> None:
        self._memory = folder / "images"  # in memory: a thousand copies and mounts cost no real disk anything
        self._memory.mkdir()
        _run("mount", "-t", "tmpfs", "tmpfs", str(self._memory))
        self.mount = folder / "mount"
        self.mount.mkdir()
        self._image, self._pristine = self._memory / "image", self._memory / "pristine"
        with self._image.open("wb") as file:
            file.truncate(SIZE_BYTES)
        _run("mkfs.ext4", "-q", "-b", "1024", "-J", "size=1", str(self._image))
        self.attach()

    def attach(self) -> None:
        """Mount; the kernel replays the journal."""
        _insist("mount", "-o", "loop", str(self._image), str(self.mount))

    def detach(self) -> None:
        _insist("umount", str(self.mount))

    def close(self) -> None:
        self.detach()
        _insist("umount", str(self._memory))

    def keep_as_pristine(self) -> None:
        self.detach()
        _copy(self._image, self._pristine)
        self.attach()

    def reset(self) -> None:
        """Back to the pristine content, mounted."""
        self.detach()
        _copy(self._pristine, self._image)
        self.attach()

    def cut_power(self) -> None:
        """Nothing gets onto the disk from now on; every call on it fails with EIO."""
        descriptor = os.open(self.mount, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _EXT4_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(descriptor)

    def power_on(self) -> None:
        """Mount what was left."""
        self.detach()
        self.attach()

    def neighbor_syncs(self) -> None:
        """Another process of this file system syncs a file of its own, which commits the journal, and with it everybody's names."""
        path = self.mount / "neighbor"
        with path.open("a") as file:
            file.write("x")
            file.flush()
            os.fsync(file.fileno())


def _copy(source: Path, target: Path) -> None:
    _run("cp", "--sparse=always", str(source), str(target))


def _insist(*command: str) -> None:
    """For what another thread, or the kernel's clearing of a loop device, may hold up for a moment."""
    for _ in range(200):
        try:
            return _run(*command)
        except NoLoopDisk:
            time.sleep(0.02)
    return _run(*command)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoLoopDisk(f"{' '.join(command)}: {done.stderr.strip()}")
