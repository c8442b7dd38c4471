"""What kind of failure it was, by what the rank said and how it ended (pure).

The kinds are few, because each has its own answer to "will it help to start again, and who must act?".
"""

from __future__ import annotations

import re
from typing import NamedTuple

from lockstep_gang.contract.exits import CONFIGURATION, HANG, NON_FINITE, OUT_OF_MEMORY
from lockstep_gang.contract.report import Cause


class TrainerEnd(NamedTuple):
    """One way in which Lockstep's trainer ends, as its exit code and as the exception that it reports before."""

    exit_code: int
    exception: str
    cause: Cause


TRAINER_ENDS = (
    TrainerEnd(HANG, "Hang", Cause.HANG),
    TrainerEnd(OUT_OF_MEMORY, "OutOfMemoryError", Cause.OUT_OF_MEMORY),
    TrainerEnd(CONFIGURATION, "ConfigError", Cause.CONFIGURATION),
    TrainerEnd(NON_FINITE, "NonFinite", Cause.NON_FINITE),
)
"""The report and the exit come in any order, and one of them may never come: a rank that has reported may be killed before it exits."""
_BY_EXIT_CODE: dict[int | None, Cause] = {end.exit_code: end.cause for end in TRAINER_ENDS}
_BY_TRAINER_EXCEPTION: dict[str | None, Cause] = {end.exception: end.cause for end in TRAINER_ENDS}
# By the exception's name first: a message may quote anything.
_EXCEPTIONS = {
    "OutOfMemoryError": Cause.OUT_OF_MEMORY,
    "MemoryError": Cause.OUT_OF_MEMORY,
    "DistBackendError": Cause.FABRIC,
    "DistNetworkError": Cause.FABRIC,
    "DistStoreError": Cause.FABRIC,
    "ConnectionResetError": Cause.FABRIC,
    "ConnectionRefusedError": Cause.FABRIC,
    "BrokenPipeError": Cause.FABRIC,
    "ModuleNotFoundError": Cause.SETUP,
    "ImportError": Cause.SETUP,
    "FloatingPointError": Cause.NON_FINITE,
}
# torch puts "[rank1]: " before every line of a traceback once a process group exists.
EXCEPTION_LINE = re.compile(
    r"^(?:\[rank\d+\]: )?(?:[A-Za-z_][\w]*\.)*([A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning)|[a-z]+error)(?:: (.*))?$"
)
"""The last line of a Python traceback, whose beginning may be out of sight."""
FRAME_LINE = re.compile(r"^(?:\[rank\d+\]: )?(?:Traceback \(most recent call last\):|  File \".*\", line \d+)")
INSIDE_TRACEBACK = re.compile(r"^(?:\[rank\d+\]: )?\s")
ANY_EXCEPTION_LINE = re.compile(r"^(?:\[rank\d+\]: )?(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)(?:: (.*))?$")
"""The line after a traceback's last frame: an exception may have any name."""
NOISE = re.compile(
    r"\s*$|(?:\[rank\d+\]:? ?)?\[?[IWEF]\d{4} |Exception ignored in|.*\bresource_tracker\b|terminate called|Aborted|Fatal Python error"
)
"""What is written while a process ends, after the exception that ended it."""
TIMED_OUT = re.compile(
    r"collective operation (timeout|timed out)|watchdog detected operation timeout|NCCL operation timed out", re.IGNORECASE
)
"""torch's words, of either NCCL backend, for a collective that some rank didn't join in time; then it aborts the process."""
_NO_COMPILER = re.compile(
    r"Unable to JIT load the \w+ op due to ninja|Error building extension '(deepspeed_\w+|(fused|cpu)_(adam|adagrad|lamb|lion))'"
)
"""DeepSpeed's words (ops/op_builder/builder.py) and torch's for an operator that can't be compiled when it is first used."""
_PLAIN_WORDS = (
    (Cause.HARDWARE, re.compile(r"uncorrectable (ECC|NVLink)|GPU (is|has been) lost|fallen off the bus|hardware stack error|Row Remap", re.IGNORECASE)),
    (Cause.SETUP, re.compile(r"EADDRINUSE|Address already in use|no kernel image is available|CUDA driver version is insufficient|Found no NVIDIA driver|no CUDA-capable device|forward compatibility was attempted|CUDA-capable device\(s\) is/are busy|system not yet initialized", re.IGNORECASE)),
    (Cause.OUT_OF_MEMORY, re.compile(r"CUDA out of memory|CUBLAS_STATUS_ALLOC_FAILED|DataLoader worker .* killed by signal: (Killed|Bus error)|insufficient shared memory", re.IGNORECASE)),
)  # fmt: skip
"""Words that mean one thing, whatever the exception is called."""
_WORDS = (
    (Cause.OUT_OF_MEMORY, re.compile(r"out of memory\b|can't allocate memory|cannot allocate memory", re.IGNORECASE)),
    (Cause.STORAGE, re.compile(r"No space left on device|Input/output error|Read-only file system|Stale file handle|Disk quota exceeded|\bcould not be saved\b|Transport endpoint is not connected", re.IGNORECASE)),
    (Cause.NON_FINITE, re.compile(r"\bloss\b.*\b(is|was|became|=+) ?(nan|inf)\b|\b(nan|inf|non-finite) (loss|gradient|grad)|loss scale already at minimum", re.IGNORECASE)),
    (Cause.SETUP, re.compile(r"can't open file|No such file or directory: '[^']*\.py'|cannot open shared object file|version `GLIBC|undefined symbol|: command not found|Too many open files|can't start new thread|Resource temporarily unavailable|name resolution|Name or service not known|Unable to JIT load|CUDA_HOME|Ninja is required", re.IGNORECASE)),
    (Cause.SETUP, _NO_COMPILER),
)  # fmt: skip
_NATIVE_WORDS = (
    (Cause.HANG, TIMED_OUT),
    (Cause.FABRIC, re.compile(r"\bNCCL (error|WARN|Last Error)|watchdog detected operation error|ncclSystemError|ncclRemoteError|ncclUnhandled|\bgloo\b.*(connection|timeout|closed)|Timed out waiting .* (recv|send) operation|No route to host|Network is unreachable", re.IGNORECASE)),
    (Cause.SETUP, re.compile(r"_execute_child.*(No such file or directory|Permission denied|Exec format error)", re.DOTALL)),
)  # fmt: skip
"""Words that libraries log beside whatever exception ends the rank."""
_REMEDIES = (
    (
        _NO_COMPILER,
        "DeepSpeed compiles this operator when it is first used, and the image has no compiler: put `deepspeed.ops.__compatible_ops__ = {}` after the "
        'script\'s `import deepspeed`, and `"torch_adam": true` into optimizer.params of its configuration',
    ),
    (re.compile(r"insufficient shared memory|DataLoader worker .*Bus error"), "a larger shm_size of the cluster, or fewer workers"),
    (
        re.compile(r"DataLoader worker .* killed by signal: Killed"),
        "more host memory (resources.limits.memory of the cluster), or less at once",
    ),
)
_NOT_JOINED = re.compile(rf"Timed out waiting|{TIMED_OUT.pattern}", re.IGNORECASE)
"""What Lockstep's trainer exits with HANG for, whatever the exception is called."""
_BY_SIGNAL = {
    "SIGBUS": Cause.OUT_OF_MEMORY,  # a write to shared memory that has no room left
    **dict.fromkeys(("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"), Cause.KILLED),
}
"""Of signals that a program's own fault doesn't raise."""


def rank_cause(trainer: bool, exit_code: int | None, signal: str | None, exception: str | None, raised: str, text: str) -> Cause:
    """`trainer`: Lockstep's own, whose exit codes mean something; `raised`: the words of the exceptions that ended it, else `text`: all its last lines."""
    by_itself = trainer_cause(exit_code, exception) if trainer else None
    if by_itself is not None:
        return by_itself
    if trainer and exit_code is None and signal is None and _NOT_JOINED.search(text):
        return Cause.HANG
    return (
        _by_words(_PLAIN_WORDS, raised)
        or _EXCEPTIONS.get(exception or "")
        or _by_words(_WORDS, raised)
        or _by_words(_NATIVE_WORDS, text)
        or _BY_SIGNAL.get(signal or "")
        or (Cause.INTERNAL if trainer else Cause.USER_CODE)
    )


def remedy(text: str) -> str:
    """What to do about an error whose own words don't say it, to be put behind them; empty where nothing is known."""
    return next((f"; {what}" for words, what in _REMEDIES if words.search(text)), "")


def _by_words(table: tuple[tuple[Cause, re.Pattern[str]], ...], text: str) -> Cause | None:
    return next((cause for cause, words in table if words.search(text)), None)


def trainer_cause(exit_code: int | None, exception: str | None) -> Cause | None:
    """What Lockstep's own trainer decided; None: it met what it doesn't know, or was ended."""
    return _BY_EXIT_CODE.get(exit_code) or _BY_TRAINER_EXCEPTION.get(exception)
