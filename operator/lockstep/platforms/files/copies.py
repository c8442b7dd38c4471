"""Copies as they are typed, and what is printed of each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from lockstep.api.errors import ConfigError, LockstepError
from lockstep.platforms.output import put, tell
from lockstep_spec.words import decimal_size

if TYPE_CHECKING:
    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.api.job import TrainingJob
    from lockstep.platforms.files.transfer import Sender

_REMOTE = re.compile(r"(?P<job>[a-z]([-a-z0-9]*[a-z0-9])?):(?P<path>.*)")


@dataclass(frozen=True)
class Remote:
    """A path on the volumes of a job."""

    job: str
    path: str


@dataclass(frozen=True)
class Copy:
    """One copy: its local and its remote end, and its direction."""

    local: str
    remote: Remote
    up: bool

    def sender(self, host: str | None, *, force: bool) -> Sender:
        """Return who sends it. `host`: whose path it is; None: this machine's."""
        from lockstep.platforms.files.sync import own_folders, sender_of
        from lockstep.platforms.files.transfer import Sender

        source = Path(self.local)
        own = f"{self.remote.job}:{own_folders(source.absolute().parent)[0]}/"
        line = f"copy it to another place, such as {own}, or replace it with --force"
        return Sender(f"{host}:{self.local}" if host else sender_of(source), line, force)


@dataclass(frozen=True)
class CopyWish:
    """Options of copies."""

    node: int | None = None
    """Node whose volume is used; None: every node's, or the first one's."""
    origin: str | None = None
    """Host whose path the source is; None: the source is this machine's."""
    force: bool = False
    """Replace what was sent from another folder."""
    job: TrainingJob | None = None
    """The job as its file describes it, if it may never have started; then `cluster` is known, too."""
    cluster: ClusterFile | None = None


def read_all(sources: Sequence[str], target: str) -> list[Copy]:
    """Parse all copies of one command before anything is copied. Raises ConfigError."""
    each = [part for source in sources for part in _contents(source)]
    if (len(sources) > 1 or each != list(sources)) and not target.endswith("/"):
        raise ConfigError(f"{target}: several files go into a folder, whose name must end with /: lockstep cp a.py b.py {target}/")
    return [read(source, target) for source in each]


def there(sources: Sequence[str], target: str) -> list[Copy]:
    """Parse copies whose sources are paths of a host. Raises ConfigError."""
    remote = _remote(target)
    if remote is None:
        raise ConfigError(f"{target}: with --from the target is JOB:/path: lockstep cp --from lab0 ~/models/llama demo:/workspace/models/")
    if len(sources) > 1 and not target.endswith("/"):
        raise ConfigError(f"{target}: several files go into a folder, whose name must end with /: {target}/")
    if wrong := [source for source in sources if _remote(source) is not None]:
        raise ConfigError(f"{wrong[0]}: with --from the source is a path of that host, such as ~/models/llama")
    return [Copy(source, remote, up=True) for source in sources]


def _contents(source: str) -> list[str]:
    """A folder of this machine that is named as `.` or `x/.` stands for what is in it, as with scp and cp."""
    if source != "." and not source.endswith("/."):
        return [source]
    folder = Path(source)
    if not folder.is_dir():
        raise ConfigError(f"{source} is not a folder: name a file or folder of this machine")
    names = sorted(str(folder / path.name) for path in folder.iterdir())
    if not names:
        raise ConfigError(f"{source} is empty: there is nothing to copy")
    return names


def read(source: str, target: str) -> Copy:
    """Parse one copy. Raises ConfigError unless exactly one of the two ends is on a job's volumes."""
    remotes = [_remote(source), _remote(target)]
    if remotes[0] is not None and remotes[1] is None:
        return Copy(target, remotes[0], up=False)
    if remotes[1] is not None and remotes[0] is None:
        if not Path(source).exists():
            raise ConfigError(f"{source} does not exist: name a file or folder of this machine")
        return Copy(source, remotes[1], up=True)
    raise ConfigError("one of SRC and DST must be JOB:/path and the other a path of this machine: lockstep cp ./model demo:/datasets/")


def _remote(text: str) -> Remote | None:
    match = _REMOTE.fullmatch(text)
    if match is None or text.startswith((".", "/")):
        return None
    path = match["path"]
    return Remote(match["job"], path if path.startswith("/") else f"/workspace/{path}")


def tell_result(copy: Copy, where: str, result: Any) -> bool:
    if isinstance(result, BaseException):
        if not isinstance(result, (LockstepError, OSError)):
            raise result
        if isinstance(result, ConfigError):
            raise result
        tell(f"{where}: not copied: {result}")
        return False
    done = (
        f"{result.sent} of {_files(result.files)} copied ({decimal_size(result.bytes)})"
        if result.sent
        else f"{_files(result.files)} {'was' if result.files == 1 else 'were'} there already"
    )
    resumed = f", {result.resumed} of them continued where they had stopped" if result.resumed else ""
    put(f"{where}: {done}{resumed}, {'to' if result.sent else 'at'} {place_of(copy)}")
    return True


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def place_of(copy: Copy) -> str:
    """Path of the copy: a target that ends with a / is the folder that it is in."""
    target, source = (copy.remote.path, copy.local) if copy.up else (copy.local, copy.remote.path)
    into = target.endswith(("/", "/.", "/..")) or target in (".", "..")
    return f"{target.rstrip('/')}/{Path(source).resolve().name if copy.up else PurePosixPath(source).name}" if into else target
