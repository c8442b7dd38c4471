"""Errors that end a run, and the exit code that the agent reads for each.

TrainerError         1  what another attempt may not meet: a volume, a device or a peer that failed
├── ConfigError     78  what the user asked for can't be done; retrying can't help
├── Stopped         75  saved and stopped, as asked by SIGTERM
├── Hang            76  something took longer than its limit
├── OutOfMemoryError 77 a device's memory, in whichever library's words
└── NonFinite       79  a loss or a gradient norm is NaN or infinite

A ConfigError ends the job, so that what `may_pass` must not become one: `refusal` decides.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from lockstep_spec.exits import CONFIGURATION, FAILED, HANG, NON_FINITE, OUT_OF_MEMORY, SAVED
from lockstep_spec.words import any_of


class TrainerError(Exception):
    """End of a run that the trainer itself decided on."""

    exit_code = FAILED


class ConfigError(TrainerError):
    """One sentence: what was read, where, what is valid and what to do."""

    exit_code = CONFIGURATION


class Stopped(TrainerError):
    """The state is committed and the ranks agreed to stop."""

    exit_code = SAVED


class Hang(TrainerError):
    """Error of a hang: it names the activity and, where it is known, the rank that the others wait for."""

    exit_code = HANG


class OutOfMemoryError(TrainerError):
    """A device's memory is exhausted. Called as torch's own, by which the agent knows it, too."""

    exit_code = OUT_OF_MEMORY


class NonFinite(TrainerError):
    """Error of a value that is not finite: it names the rank and the step; nothing of that step was applied or saved."""

    exit_code = NON_FINITE


_LASTING = frozenset(
    {
        errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EACCES, errno.EPERM, errno.ELOOP,
        errno.ENAMETOOLONG, errno.EROFS, errno.EINVAL, errno.EBADF, errno.EFBIG, errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP,
        errno.ENOTTY, errno.ESPIPE, errno.E2BIG, errno.ENOEXEC, errno.EMSGSIZE, errno.EILSEQ, errno.EDOM, errno.ERANGE,
    }
)  # fmt: skip
"""The system's errors that the same again would meet again: names, kinds, rights and sizes. All others are a volume's, a network's or a
device's.
"""
_PASSING_NUMBERS = sorted(errno.errorcode.keys() - _LASTING)
_PASSING_CLASSES = frozenset(
    {
        ("torch", "DistError"), ("torch", "AcceleratorError"), ("httpx", "TransportError"), ("httpx2", "TransportError"),
        ("requests", "ConnectionError"), ("requests", "Timeout"), ("urllib3", "HTTPError"), ("aiohttp", "ClientConnectionError"),
        ("aiohttp", "ClientPayloadError"), ("http", "IncompleteRead"),
    }
)  # fmt: skip
"""Package and class, since none of these packages need be imported."""
_PASSING_WORDS = any_of(
    *(re.escape(os.strerror(number)) for number in _PASSING_NUMBERS),
    r"\bCUDA (driver )?error\b|\bHIP error\b|\bcuDNN error\b|\bCU(DNN|BLAS|SPARSE|SOLVER)_STATUS_|\bNCCL (error|Error)\b",
    r"Connection closed by peer|Application timeout caused pair closure|error sending request",
    r"Timed out waiting|timed out connecting|operation timed out",
)
"""Words of errors that libraries in C++ and Rust raise as RuntimeError and the like, and of problems that are text already."""
_NUMBER = re.compile(r"\[Errno (-?\d+)\]|\(os error (\d+)\)")
"""Number of a system's error as Python and Rust write it, whatever the language of the words beside it."""
_LASTING_WORDS = any_of(
    r"driver version is insufficient|driver on your system is too old|driver is a stub library|unsupported display driver",
    r"not supported in the installed CUDA driver|forward compatibility was attempted",
    r"no kernel image is available|invalid device function|compiled with an unsupported toolchain",
)
"""A GPU or a driver that doesn't fit the image."""
_OUT_OF_MEMORY = any_of(
    r"\b(CUDA|HIP|Triton)\b[^\n]{0,60}\bout of memory",
    r"\bCu\w+[^\n]{0,40}'out of memory'",
    r"\bCUDA_ERROR_OUT_OF_MEMORY\b|hipErrorOutOfMemory|\b(cuda|hip)ErrorMemoryAllocation\b",
    r"\b(CU|HIP|ROC)[A-Z]+_(STATUS_)?(\w+_)?ALLOC(ATION)?_FAILED",
    r"\bFailed to CUDA (m|c)alloc\b|\b(cuda|hip)Malloc(?!Host)\w* failed",
    r"\bError (2: )?out of memory\b",
    flags=re.IGNORECASE,
)
"""The words of CUDA, Triton, NCCL, cuBLAS, cuDNN, bitsandbytes and their siblings for a device's memory that is exhausted."""
_HOST_MEMORY = any_of(
    r"Failed to CUDA host alloc|\b(cuda|hip)(HostAlloc|MallocHost|HostMalloc)\w* failed", re.escape(os.strerror(errno.ENOMEM))
)
"""The host's memory, which a plan for the device's says nothing of."""


_NOT_JOINED = ("Timed out waiting", "NCCL operation timed out", "collective operation timed out", "collective operation timeout")
"""Words of gloo and of both NCCL backends for a collective that some rank didn't join."""
TRIED_AGAIN = "this may pass, and the next attempt tries it again"


class Problem(NamedTuple):
    """A refusal on its way between ranks, as JSON. `final`: no other attempt can help."""

    message: str
    final: bool = True

    def error(self) -> TrainerError:
        return (ConfigError if self.final else TrainerError)(self.message)


def gravest(problems: Iterable[Problem]) -> Problem | None:
    """The first that is final, else the first: what may pass on one node must not hide what can't on another."""
    every = list(problems)
    return next((problem for problem in every if problem.final), every[0] if every else None)


def problem_of(error: TrainerError) -> Problem:
    return Problem(str(error), isinstance(error, ConfigError))


def refusal(message: str, cause: BaseException | str) -> TrainerError:
    """The error to raise for what `message` says and `cause` brought about: ConfigError where the same again would fail the same way.

    Where it may pass: OutOfMemoryError, or a TrainerError, after which restarts count. `message` then goes on with the cause, if it
    doesn't name it already, and with what helps. A `cause` that is text is a problem that another rank or an earlier look has found.
    """
    if out_of_memory(cause):
        return OutOfMemoryError(_with_cause(message, cause))
    if not may_pass(cause):
        return ConfigError(message)
    whole = _with_cause(message, cause)
    return TrainerError(f"{whole}; {_remedy(cause)}")


def may_pass(cause: BaseException | str) -> bool:
    """Return True if another attempt may not meet it: a fault of a volume, a network, a device or a peer, anywhere in the chain of
    causes.
    """
    if isinstance(cause, str):
        return _words_may_pass(cause)
    return any(_passes(error) for error in _chain(cause))


def out_of_memory(cause: BaseException | str) -> bool:
    """Return True if a device's memory is exhausted, in the words of any library, anywhere in the chain of causes. torch's errors are
    recognized by their names and words, since torch may not even be imported.
    """
    if isinstance(cause, str):
        return _OUT_OF_MEMORY.search(cause) is not None
    return any(type(error).__name__ == "OutOfMemoryError" or _OUT_OF_MEMORY.search(str(error)) for error in _chain(cause))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and what led to it: libraries raise a new one while they handle the first, with `from`, without, or with another one
    there. Of a group also its members.
    """
    seen: set[int] = set()
    links: list[BaseException | None] = [error]
    while links:
        link = links.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            links += [*getattr(link, "exceptions", ()), link.__context__, link.__cause__]


def _passes(error: BaseException) -> bool:
    names = {(kind.__module__.split(".")[0], kind.__name__) for kind in type(error).__mro__}
    if ("huggingface_hub", "OfflineModeIsEnabled") in names or _LASTING_WORDS.search(str(error)):
        return False
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status in {408, 425, 429} or status >= 500
    if ("ssl", "SSLError") in names:  # an OSError whose number is OpenSSL's
        return ("ssl", "SSLCertVerificationError") not in names
    if isinstance(error, OSError) and isinstance(error.errno, int):
        return error.errno not in _LASTING
    if isinstance(error, ConnectionError | TimeoutError | MemoryError) or not names.isdisjoint(_PASSING_CLASSES):
        return True
    return type(error).__name__ == "OutOfMemoryError" or _words_may_pass(str(error))


def _words_may_pass(text: str) -> bool:
    if _LASTING_WORDS.search(text):
        return False
    numbers = [int(python or rust) for python, rust in _NUMBER.findall(text)]
    return any(number not in _LASTING for number in numbers) or any(
        words.search(text) for words in (_PASSING_WORDS, _OUT_OF_MEMORY, _HOST_MEMORY)
    )


def lasts_on_this_device(words: str) -> bool:
    """Return True if a library's words for a GPU that can't be used say that the GPU or its driver doesn't fit the image; all others may
    pass.
    """
    return _LASTING_WORDS.search(words) is not None


def _with_cause(message: str, cause: BaseException | str) -> str:
    """`message`, and the first of the causes that may pass, where it isn't in there."""
    if isinstance(cause, str):
        return message if cause in message else f"{message} ({cause})"
    first: Any = next((error for error in _chain(cause) if _passes(error)), cause)
    words = first_line(first)
    named = words in message or (isinstance(first, OSError) and bool(first.strerror) and str(first.strerror) in message)
    return message if named and words else f"{message} ({type(first).__name__}: {words})"


def _remedy(cause: BaseException | str) -> str:
    text = cause if isinstance(cause, str) else " ".join(f"{type(error).__name__} {error}" for error in _chain(cause))
    if os.strerror(errno.ENOSPC) in text:
        return "its file system is full: delete what isn't needed there or make it larger, and the next attempt goes on"
    if os.strerror(errno.EDQUOT) in text:
        return "the quota of its file system is used up: delete what isn't needed there or raise the quota, and the next attempt goes on"
    if _HOST_MEMORY.search(text) or "MemoryError" in text:
        return "the node's own memory is used up, not a GPU's: give the job more of it; the next attempt tries it again"
    return TRIED_AGAIN


def first_line(error: BaseException) -> str:
    """First line of a library's error, which may go on with advice for others."""
    return str(error).strip().split("\n", 1)[0]


def reason_of(error: BaseException) -> str:
    """An error in words: its first line, with the next one where that ends in a colon, and with its type where it is no sentence."""
    if "trust_remote_code" in str(error):
        return "transformers has no class of its own for it, and Lockstep runs no code of a model's folder (auto_map)"
    first, *others = (line.strip() for line in str(error).strip().split("\n"))
    words = f"{first} {others[0]}" if first.endswith(":") and others else first
    return words if " " in words else f"{type(error).__name__}: {words}"


def print_problem(error: TrainerError | OSError) -> int:
    """A command's error as one sentence for people; the command's exit code."""
    if isinstance(error, TrainerError):
        print(f"lockstep: {error}", file=sys.stderr)
        return error.exit_code
    where = f"{error.filename}: " if error.filename else ""
    reason = error.strerror or error
    print(f"lockstep: {where}{reason}; check that the folders are readable and writable, and that the volume has room", file=sys.stderr)
    return FAILED


def exit_code_of(error: BaseException) -> int:
    """Exit code that the agent reads. A plain TrainerError is judged by what led to it."""
    if isinstance(error, TrainerError) and error.exit_code != FAILED:
        return error.exit_code
    if out_of_memory(error):
        return OUT_OF_MEMORY
    return HANG if any(words in str(error) for words in _NOT_JOINED) else FAILED


def leave_process(code: int) -> None:
    """End this process at once. Native threads of gloo and NCCL can abort a process in its static destructors, and the
    exit code is what the agent judges by; so nothing runs after the streams are flushed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
