"""The machine as it was before: kernel settings that a kubelet changes, one that it has too little of, and folders on which nodes mount one
of their own.

`up` notes and makes them, `down` puts them back.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

KERNEL_SETTINGS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)

LOG_BYTES = 1 << 16
INSTANCES = Path("/proc/sys/fs/inotify/max_user_instances")


def note_settings(record: Path, root: Path = Path("/proc/sys")) -> None:
    """Write down the settings as they are, unless that was done before: a repaired cluster has changed them already."""
    if not record.exists():
        values = {name: (root / name).read_text().strip() for name in KERNEL_SETTINGS if (root / name).exists()}
        temporary = record.with_suffix(".tmp")
        temporary.write_text(json.dumps(values))
        temporary.replace(record)


def restore_settings(record: Path, root: Path = Path("/proc/sys")) -> None:
    """Put the settings back as they were noted; nothing when nothing was."""
    if not record.exists():
        return
    for name, value in json.loads(record.read_text()).items():
        if (root / name).read_text().strip() != value:
            (root / name).write_text(value)


def too_few_instances(log: Path) -> str:
    """Reason why a daemon ended, where its log says that this machine gives root's processes no more inotify instances; else nothing."""
    if not log.exists() or b"too many open files" not in log.read_bytes()[-LOG_BYTES:].lower():
        return ""
    return f"it got no inotify instance of this machine's {INSTANCES.read_text().strip()}: sysctl fs.inotify.max_user_instances=1024"


def is_mounted_anywhere(folder: Path) -> bool:
    """Return True if any process, in any mount namespace, sees a mount on this folder."""
    namespaces: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            namespace = str((process / "ns" / "mnt").readlink())
            if namespace in namespaces:
                continue
            mounts = (process / "mountinfo").read_text().splitlines()
        except OSError:  # it ended
            continue
        namespaces.add(namespace)
        if any(line.split()[4] == str(folder) for line in mounts):
            return True
    return False


def remove_unused(folders: Iterable[Path]) -> None:
    """Remove empty folders of the host on which nodes mount one of their own, unless a process has something mounted there.

    Removing a folder detaches what other mount namespaces have mounted on it, without a word: the nodes of another cluster
    would lose the state of their containers and could not end them any more.
    """
    for folder in folders:
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()) and not is_mounted_anywhere(folder):
            folder.rmdir()


def clear(folder: Path, keeps: Callable[[Path], bool]) -> None:
    """Remove everything from a folder but what `keeps` names."""
    for path in folder.iterdir():
        if keeps(path):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
