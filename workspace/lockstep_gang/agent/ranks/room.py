"""Room for what ranks write: files of killed ones that would take it from the next, and the file system that had none."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path

from lockstep_gang.contract.placewords import words_of
from lockstep_gang.contract.run import Run
from lockstep_gang.lifecycle.causes import NO_ROOM
from lockstep_machine.readings import file_words
from lockstep_spec.files import ENLARGE, lacks_room, mount_of, room_words
from lockstep_spec.words import binary_size, number_of

SHM, TMP = Path("/dev/shm"), Path("/tmp")  # noqa: S108 (files are removed there, none is made)
LOOK_SECONDS = 5.0
"""Time between two looks at which files ranks use."""
_NAMES = re.compile(r"(psm|torch|deepspeed)_|nccl-|sem\.(mp|loky)-")
"""Names that multiprocessing, torch, DeepSpeed, NCCL and loky give to shared memory."""
_STATUS = re.compile(r"^State:\s+[^Z].*^Uid:\s+\d+\s+(?P<uid>\d+)(?:.*^NSpgid:\s+(?P<group>\d+))?", re.MULTILINE | re.DOTALL)
_PATH = re.compile(r"(?<![\w.~/-])/[^\s'\"`<>():;,]+")


def lack_of_room(run: Run, lines: Sequence[str]) -> str:
    """Return which file system has no room and what helps, for a rank that wrote so in its last lines or was ended by SIGBUS; empty: none
    is known.
    """
    line = next((line for line in reversed(lines) if NO_ROOM.search(line)), "")
    if not line:
        return ""
    place, usual = words_of(run), [SHM, TMP, Path(os.environ.get("HOME", "/"), ".cache"), Path(run.run_dir)]
    memory = re.search("SIGBUS|Bus error", line) is not None
    named = [] if memory else [Path(path) for path in _PATH.findall(line.replace("</torch_", f"<{SHM}/torch_"))]
    try:
        mounts = list(map(mount_of, named or usual[: 1 if memory else None]))
        mount = next(filter(lacks_room, mounts), mounts[0] if named else None)
        if mount is None:
            return ""
        help_ = {SHM: place.more_shared_memory, Path("/"): place.own_disk, TMP: place.own_disk, mount_of(usual[-1]): ENLARGE}
        return room_words(mount, quota="quota" in line, more=help_.get(mount, ENLARGE))
    except OSError:
        return ""


class Leavings:
    """Files of this node's ranks in a folder that all processes use.

    `own`: the folder is the pod's, so what was made there since the attempt began is its ranks', and what has a known name, too. Elsewhere,
    what was made since then under a known name, and was seen in use by a rank. Nothing that a process still uses. `agents`: a folder in it
    that isn't the ranks'; it has their caches, too, so nothing is removed where there is room.
    """

    def __init__(self, folder: Path, own: bool, agents: Path | None = None) -> None:
        self._folder, self.own, self._agents = folder, own, agents
        self._since = 0.0
        self._used: set[Path] = set()

    def begin_attempt(self) -> None:
        self._since = time.time()
        self._used.clear()

    def look(self, leaders: Container[int]) -> None:
        """Note which files the process groups of these ranks use."""
        new = self._files().keys() - self._used
        if new:
            names = self._in_use(_processes(leaders))
            self._used |= {path for path in new if path.name in names}

    def clear(self) -> str:
        """Remove what ended ranks left. Return a sentence about it; empty: there was nothing."""
        if self._agents is not None and not lacks_room(self._folder):
            return ""
        left = {path: size for path, size in self._files().items() if self.own or path in self._used}
        if not left:
            return ""
        try:
            names = self._in_use(_processes())
        except PermissionError as error:
            return f"{number_of(len(left), 'file')} that ended ranks left in {self._folder} may be in use: {error.filename} can't be read"
        removed = [size for path, size in left.items() if path.name not in names and _remove(path, self._folder)]
        return (
            f"removed {number_of(len(removed), 'file')} ({binary_size(sum(removed))}) that ended ranks had left in {self._folder}"
            if removed
            else ""
        )

    def _in_use(self, processes: Iterable[Path]) -> set[str]:
        """Names in use. Raises PermissionError for a process in the pod that can't be looked at. Elsewhere, each user has some, such as
        sshd's.
        """
        names = set[str]()
        for process in processes:
            try:
                names.update(_names_in_use(process))
            except PermissionError:
                if self.own:
                    raise
        return names

    def _files(self) -> dict[Path, int]:
        """Files that may be ranks', each with its bytes. In a folder that isn't the pod's, not what is below it."""
        files = {}
        for folder, folders, names in os.walk(self._folder):
            folders[:] = [name for name in folders if self.own and Path(folder, name) != self._agents]
            for name in names:
                try:
                    status = os.lstat(path := Path(folder, name))
                except OSError:
                    continue
                signs = status.st_ctime >= self._since, _NAMES.match(name) is not None
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and (any(signs) if self.own else all(signs)):
                    files[path] = status.st_blocks * 512
        return files


def leavings_of(run: Run, agent_folder: Path) -> tuple[Leavings, ...]:
    """Return where ranks of this agent leave files. It knows for sure that the pod's are theirs if it is the first process of a job's
    container.
    """
    own = run.host is None and run.interactive is None and os.getpid() == 1
    return (Leavings(SHM, own), *([Leavings(TMP, own, agent_folder)] if own else []))


def _remove(path: Path, top: Path) -> bool:
    """Remove a file, and the folders above it that are empty then, which a script would take for its finished copy. Return True if the file
    is gone.
    """
    with contextlib.suppress(OSError):
        path.unlink()
        for folder in path.parents[: path.parents.index(top)]:
            folder.rmdir()
    return not os.path.lexists(path)


def _processes(leaders: Container[int] | None = None) -> Iterator[Path]:
    """Folders in /proc of this user's processes, but for zombies. `leaders`: only those of their process groups."""
    for status in Path("/proc").glob("[0-9]*/status"):
        match = _STATUS.search(file_words(status))
        if match and int(match["uid"]) == os.geteuid() and (leaders is None or int(match["group"] or 0) in leaders):
            yield status.parent


def _names_in_use(process: Path) -> Iterator[str]:
    """Names of the files that a process has open or mapped, without their folders, which other mount namespaces call otherwise. Raises
    PermissionError.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        lines = (process / "maps").read_text(errors="surrogateescape").splitlines()
        yield from (line.rpartition("/")[2] for line in lines if "/" in line)
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                yield descriptor.readlink().name
