"""Stops a process before every call that changes a file system, and lets it go on when told to.

The kernel does it (seccomp's user notification), so it sees what Python, Rust and C++ write, in threads too, whoever wrote the code.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import platform
import struct
from dataclasses import dataclass
from pathlib import Path

_NUMBERS = {
    "write": 1, "open": 2, "pwrite64": 18, "writev": 20, "sendfile": 40, "fsync": 74, "fdatasync": 75, "truncate": 76, "ftruncate": 77,
    "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85, "link": 86, "unlink": 87, "symlink": 88, "sync": 162, "openat": 257,
    "mkdirat": 258, "unlinkat": 263, "renameat": 264, "linkat": 265, "symlinkat": 266, "sync_file_range": 277, "fallocate": 285,
    "pwritev": 296, "syncfs": 306, "renameat2": 316, "copy_file_range": 326, "pwritev2": 328,
}  # fmt: skip
_NAMES = {number: name for name, number in _NUMBERS.items()}
_OF_DESCRIPTOR = {
    "write": 0, "pwrite64": 0, "writev": 0, "sendfile": 0, "fsync": 0, "fdatasync": 0, "ftruncate": 0, "sync_file_range": 0,
    "fallocate": 0, "pwritev": 0, "syncfs": 0, "copy_file_range": 2, "pwritev2": 0,
}  # fmt: skip
"""Which argument is the descriptor of the file that changes."""
_OF_PATH = {
    "open": 0, "truncate": 0, "rename": 1, "mkdir": 0, "rmdir": 0, "creat": 0, "link": 1, "unlink": 0, "symlink": 1,
}  # fmt: skip
"""Which argument is the path; of two the new one."""
_OF_PATH_AT = {"openat": 0, "mkdirat": 0, "unlinkat": 0, "renameat": 2, "linkat": 2, "symlinkat": 1, "renameat2": 2}
"""Which argument is the folder's descriptor; the path is the next one."""

_AUDIT_ARCH_X86_64 = 0xC000003E
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_SYS_SECCOMP, _SET_MODE_FILTER, _NEW_LISTENER = 317, 1, 8
_PR_SET_NO_NEW_PRIVS = 38
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
_AT_FDCWD = -100

_libc = ctypes.CDLL(None, use_errno=True)


def listen() -> int:
    """In the process to watch, before it has threads: from here on each such call waits for the owner of the returned descriptor."""
    if platform.machine() != "x86_64":
        raise OSError(f"this machine is {platform.machine()}: the numbers of system calls are known here for x86_64 only")
    instructions = [(_LOAD, 0, 0, 4), (_JUMP_EQUAL, 0, len(_NUMBERS) + 1, _AUDIT_ARCH_X86_64), (_LOAD, 0, 0, 0)]
    numbers = list(_NUMBERS.values())
    instructions += [(_JUMP_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)]
    instructions += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _NOTIFY)]
    filters = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
    program_body = ctypes.create_string_buffer(filters)
    program = struct.pack("HxxxxxxQ", len(instructions), ctypes.addressof(program_body))
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    listener = int(_libc.syscall(_SYS_SECCOMP, _SET_MODE_FILTER, _NEW_LISTENER, ctypes.create_string_buffer(program)))
    if listener < 0:
        raise OSError(ctypes.get_errno(), "the kernel has no seccomp user notification (Linux 5.0 or newer has it)")
    return listener


@dataclass(frozen=True)
class Call:
    """A call that waits."""

    identity: int
    thread: int
    name: str
    path: str
    """What it changes; empty where that can't be told (a pipe, a process that is gone)."""

    def __str__(self) -> str:
        return f"{self.name} {self.path}"


def receive(listener: int) -> Call | None:
    """The next call that waits; None when its process died meanwhile."""
    buffer = bytearray(80)
    try:
        fcntl.ioctl(listener, _RECEIVE, buffer)
    except OSError:
        return None
    identity, thread, _, number, _, _, *arguments = struct.unpack("QIIiIQ6Q", buffer)
    name = _NAMES[number]
    return Call(identity, thread, name, _path(name, thread, arguments))


def let_go(listener: int, call: Call) -> None:
    """Let it happen."""
    with contextlib.suppress(FileNotFoundError):  # the process was killed while it waited
        fcntl.ioctl(listener, _SEND, struct.pack("QqiI", call.identity, 0, 0, _CONTINUE))


def _path(name: str, thread: int, arguments: list[int]) -> str:
    process = Path(f"/proc/{thread}")
    try:
        if name in _OF_DESCRIPTOR:
            return str((process / f"fd/{arguments[_OF_DESCRIPTOR[name]]}").readlink())
        if name in _OF_PATH:
            return str((process / "cwd").readlink() / _text(process, arguments[_OF_PATH[name]]))
        if name in _OF_PATH_AT:
            at = _OF_PATH_AT[name]
            descriptor = ctypes.c_int(arguments[at] & 0xFFFFFFFF).value
            folder = (process / ("cwd" if descriptor == _AT_FDCWD else f"fd/{descriptor}")).readlink()
            return str(folder / _text(process, arguments[at + 1]))
    except OSError:
        return ""
    return ""


def _text(process: Path, address: int) -> str:
    with (process / "mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        try:
            content = memory.read(4096)
        except OSError:  # it ends at a page that isn't mapped
            memory.seek(address)
            content = memory.read(4096 - address % 4096)
    return content.split(b"\0", 1)[0].decode(errors="replace")
