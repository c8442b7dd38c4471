"""Kinds of failures, by what the rank wrote and how it ended (pure).

The kinds are few, because each has its own answer to "will it help to start again, and who must act?".

An exception is judged by what it is: the system's error number, what means one thing whoever says it, its class, then its words. One that
says no more than that something failed is judged by the exception that led to it. Only a rank that raised nothing is judged by what it
printed last.
"""

from __future__ import annotations

import errno
import re
import signal as signals
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lockstep_gang.contract.placewords import PlaceWords
from lockstep_gang.contract.report import Cause
from lockstep_gang.lifecycle.tracebacks import Raised
from lockstep_spec.exits import CONFIGURATION, HANG, NON_FINITE, OUT_OF_MEMORY, SAVED
from lockstep_spec.words import any_of


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
"""Ends of the trainer. The report and the exit come in any order, and one of them may never come: a rank that has reported may be killed
before it exits.
"""
_BY_EXIT_CODE: dict[int | None, Cause] = {end.exit_code: end.cause for end in TRAINER_ENDS}
_BY_TRAINER_EXCEPTION: dict[str | None, Cause] = {end.exception: end.cause for end in TRAINER_ENDS}
_EXCEPTIONS = {
    "DistBackendError": Cause.FABRIC,
    "DistNetworkError": Cause.FABRIC,
    "DistStoreError": Cause.FABRIC,
    "ConnectionResetError": Cause.FABRIC,
    "ConnectionRefusedError": Cause.FABRIC,
    "ConnectionAbortedError": Cause.FABRIC,
    "BrokenPipeError": Cause.FABRIC,
    "ModuleNotFoundError": Cause.SETUP,
    "ImportError": Cause.SETUP,
    "PackageNotFoundError": Cause.SETUP,
    "CUDAMismatchException": Cause.SETUP,
    "MissingCUDAException": Cause.SETUP,
    **dict.fromkeys(
        (
            "ConnectError", "ConnectTimeout", "ReadTimeout", "ProxyError", "SSLError", "SSLCertVerificationError", "MaxRetryError",
            "NewConnectionError", "NameResolutionError", "EndpointConnectionError", "ClientConnectorError", "NoCredentialsError",
            "CommError", "AuthenticationError", "_InactiveRpcError", "AioRpcError",
        ),
        Cause.SETUP,  # of HTTP's libraries: a service outside the job
    ),
    "BrokenProcessPool": Cause.KILLED,
    "TerminatedWorkerError": Cause.KILLED,  # joblib's
    "FloatingPointError": Cause.NON_FINITE,
    "bad_alloc": Cause.OUT_OF_MEMORY,
    **dict.fromkeys(
        (
            "KeyError", "IndexError", "AttributeError", "TypeError", "NameError", "UnboundLocalError", "ZeroDivisionError", "SyntaxError",
            "IndentationError", "RecursionError", "NotImplementedError", "StopIteration", "UnicodeDecodeError", "JSONDecodeError",
        ),
        Cause.USER_CODE,
    ),
}  # fmt: skip
"""Causes of exceptions that are one thing by their class. A KeyError's message is a key, which may be any word."""
_OF_A_CONNECTION = frozenset(name for name, cause in _EXCEPTIONS.items() if cause is Cause.FABRIC)
"""Exceptions of a connection. A path beside them says that a volume's server is at the other end."""
_MEMORY_ERROR = re.compile(r"MemoryError$")
"""End of the class's name: numpy's, pyarrow's and torch's have names of their own before it."""
TIMED_OUT = any_of(
    r"collective operation (timeout|timed out)",
    r"watchdog detected operation timeout",
    r"NCCL operation timed out",
    r"Timed out waiting \d+ ?ms for (recv|send) operation",
    r"Timed out after \d+ seconds waiting for clients",
    r"wait timeout after \d+ ?ms, keys:",
    r"client socket has timed out after \d+ ?ms while trying to connect",
    flags=re.IGNORECASE,
)
"""torch's words, of gloo, its store and either NCCL backend, for what some rank didn't join in time; then it may abort the process."""
NO_ROOM = any_of("No space left on device", "Disk quota exceeded", "SIGBUS", "killed by signal: Bus error")
"""Words for a file system that takes no more; of shared memory there is no error, but a signal."""
_NO_COMPILER = any_of(
    r"Unable to JIT load the \w+ op due to ninja",
    r"Error building extension '(deepspeed_\w+|(fused|cpu)_(adam|adagrad|lamb|lion))'",
)
"""DeepSpeed's words (ops/op_builder/builder.py) and torch's for an operator that can't be compiled when it is first used."""
_SHARED_MEMORY = re.compile(
    r"(?=.*(/dev/shm/|</torch_|shared memory))"
    r"(?=.*(No space left|Cannot allocate|unable to (allocate|write|resize)|insufficient|failed to extend|while creating))",
    re.IGNORECASE | re.DOTALL,
)
_PLAIN_WORDS = (
    (Cause.HARDWARE, any_of(
        r"(uncorrectable|(un)?contained|double.bit) (ECC|NVLink)",
        r"GPU (is|has been) lost|fallen off the bus",
        r"\bhardware (stack )?error\b|Row Remap",
        flags=re.IGNORECASE,
    )),
    (Cause.SETUP, any_of(
        r"EADDRINUSE|Address already in use",
        r"no kernel image is available|compiled with an unsupported toolchain",
        r"CUDA driver version is insufficient|Driver/library version mismatch|unsupported display driver",
        r"forward compatibility was attempted|CUDNN_STATUS_\w*VERSION_MISMATCH",
        r"Found no NVIDIA driver|no CUDA-capable device|No CUDA GPUs are available|requires at least one CUDA device",
        r"CUDA-capable device(\(s\) is/are|s are) busy|system not yet initialized|CUDA unknown error",
        r"not compiled with CUDA|torch\.cuda\.is_available\(\) is False|doesn't have \w+ built in",
        r"CUDA Setup failed|only supported with GPUs|only supports \w+ GPUs|compute capability \d[\d.]* or",
        r"Failed to find C compiler|No working C\+\+ compiler",
        r"No module named|binary incompatibility|Unable to load any of|version of \w+ is out of date",
        r"\bpip3? install (-U|--upgrade)\b",
        r"No matching distribution found|No solution found when resolving dependencies|PackagesNotFoundError",
        r"Unable to find address for",
        r"inotify (watch|instance) limit reached|ibv_\w+ failed with error Cannot allocate memory",
        r"unsupported locale setting|No time zone found with key",
        flags=re.IGNORECASE,
    )),
    (Cause.SETUP, any_of(
        r"HTTPS?ConnectionPool|urlopen error|connecting to [\w.-]+:\d+|StatusCode\.UNAVAILABLE",
        r"couldn't connect to 'https?:|Could not connect to the endpoint URL",
        r"\b(4(0[137]|29) Client|5\d\d Server) Error|HTTP Error (40[137]|429|5\d\d)|\(40[13]\)|Too Many Requests",
        r"Hugging ?Face Hub|on the Hub\b|can't be asked for the (model|dataset)|HF_HUB_OFFLINE|gated repo",
        r"AccessDenied|No API key|Unable to locate credentials",
        r"Tunnel connection failed|CERTIFICATE_VERIFY_FAILED",
        flags=re.IGNORECASE,
    )),
    (Cause.OUT_OF_MEMORY, any_of(
        r"(CUDA|HIP) out of memory|CUDA error: out of memory|Cuda failure \d* ?'out of memory'",
        r"CU\w+_ALLOC_FAILED",
        r"DataLoader worker .* killed by signal: (Killed|Bus error)",
        r"bad_alloc|DefaultCPUAllocator|memory allocation of \d+ bytes failed|Memory allocation still failed",
        flags=re.IGNORECASE,
    )),
    (Cause.OUT_OF_MEMORY, _SHARED_MEMORY),
    (Cause.STORAGE, re.compile(r"unable to lock file")),
)  # fmt: skip
"""Words that mean one thing, whatever the exception is called."""
_MISUSE = re.compile(r"ncclInvalidUsage|ncclInvalidArgument|\bDuplicate GPU detected")
"""NCCL's words for a call that could never work: of the script, not of the fabric."""
_OWN_IMPORT = any_of(
    r"partially initialized module",
    r"cannot import name .* from .* \((?!.*(site-packages|dist-packages|/lib/python)).*\)$",
    flags=re.DOTALL,
)
"""A name that a module of the script's own doesn't have."""
_NOT_A_NUMBER = r"(`|\b)(nan|inf|infinity|non-?finite)\b"
_NUMBER = r"\b(loss|grad\w*|norm|logits?|weights?|outputs?|activations?|values?)\b"
_BECAME = r"(\b(is|was|are|became|has|contains?|invalid values:)\b|[=:])\W*((?:[a-z]+\W+){0,2})"
_WORDS = (
    (Cause.OUT_OF_MEMORY, any_of(r"out of memory\b", "can't allocate memory", "cannot allocate memory", flags=re.IGNORECASE)),
    (Cause.STORAGE, any_of(
        r"No space left on device|Disk quota exceeded|disk is full|free disk space|are free there; free",
        r"Input/output error|Stale file handle|Transport endpoint is not connected",
        r"Read-only file system|No usable temporary directory|cannot (create|open|touch|move|remove) .*: Permission denied",
        r"\bcould not be saved\b|PytorchStreamWriter failed|file write failed|inline_container.*unexpected pos",
        flags=re.IGNORECASE,
    )),
    (Cause.NON_FINITE, any_of(
        rf"{_NUMBER}.*{_BECAME}{_NOT_A_NUMBER}",
        rf"{_NOT_A_NUMBER} (loss|grad\w*|values?|norm)",
        r"(is|are) (not finite|non-?finite)",
        r"\bNaNs?( values?)? (was |were )?(detected|found|encountered|in)\b",
        r"(detected|found|encountered|got) (a )?NaN",
        r"probability tensor contains|cannot convert float (NaN|infinity)|loss scale already at minimum",
        flags=re.IGNORECASE | re.DOTALL,
    )),
    (Cause.SETUP, any_of(
        r"can't open file|No such file or directory: '[^']*\.py'",
        r"cannot open shared object file|version `GLIBC|undefined symbol",
        r"\.so[.\d]*: (invalid ELF header|wrong ELF class|file too short|failed to map segment)",
        r"\.so[.\d]*: cannot (read file data|allocate memory in static TLS)",
        r": command not found|^sh: \d+: .*: not found$|: unbound variable$|: parameter (null or )?not set$",
        r"Too many open files|can't start new thread|Resource temporarily unavailable",
        r"name resolution|Name or service not known",
        r"Unable to JIT load|CUDA_HOME|Ninja is required",
        flags=re.IGNORECASE | re.MULTILINE,
    )),
    (Cause.SETUP, _NO_COMPILER),
)  # fmt: skip
_NATIVE_WORDS = (
    (Cause.HANG, TIMED_OUT),
    (Cause.FABRIC, any_of(
        r"\bNCCL (error|WARN|Last Error)|ncclSystemError|ncclRemoteError|ncclUnhandled",
        r"watchdog detected operation error|Timed out waiting .* (recv|send) operation",
        r"\bgloo\b.*(connect|timeout|closed)",
        r"No route to host|Network is unreachable",
        flags=re.IGNORECASE,
    )),
)  # fmt: skip
"""Words of the libraries that ranks talk by."""
_NO_PROGRAM = re.compile(r"(_execute_child|_execvpe)\b.*(No such file or directory|Permission denied|Exec format error)", re.DOTALL)
"""A program that Python's subprocess or os could not start, by the traceback's frames."""
_IMPORTED = re.compile(r'[/\\](site|dist)-packages[/\\][^"\n]*", line \d+, in <module>')
"""Frame of an installed module that is being imported."""
_OF_THE_SYSTEM = frozenset({"FileNotFoundError", "PermissionError", "OSError"})


def _numbers(*names: str) -> frozenset[int]:
    """Numbers of the system's errors with these names; not every system has all."""
    return frozenset(getattr(errno, name) for name in names if hasattr(errno, name))


_BY_ERRNO = (
    (Cause.OUT_OF_MEMORY, _numbers("ENOMEM")),
    (Cause.STORAGE, _numbers("ENOSPC", "EDQUOT", "EROFS", "EIO", "ESTALE", "EREMOTEIO", "EUCLEAN", "ENOLCK", "EBADMSG", "EFBIG", "EMLINK")),
    (Cause.SETUP, _numbers("EMFILE", "ENFILE", "EAGAIN", "ENOEXEC", "EADDRINUSE")),
)
_OF_A_PATH = _numbers(
    "ENOENT", "EEXIST", "ENOTDIR", "EISDIR", "ENAMETOOLONG", "ELOOP", "ENOTEMPTY", "EINVAL", "EBADF", "EXDEV", "ESPIPE", "ETXTBSY", "E2BIG",
)  # fmt: skip
"""Errors that a script makes in a path or in its use. All others that name a path are the volume's, its server's or its rights'."""
_BY_ERRNO_OF_A_CONNECTION = (
    (Cause.FABRIC, _numbers(
        "ECONNRESET", "ECONNREFUSED", "ECONNABORTED", "EPIPE", "ETIMEDOUT",
        "ENETUNREACH", "EHOSTUNREACH", "ENETDOWN", "ENOTCONN", "ESHUTDOWN",
    )),
)  # fmt: skip
_ERRNO = re.compile(r"\[Errno (?P<python>\d+)\](?P<path> [^:]*: (b?['\"]))?|\(os error (?P<rust>\d+)\)")
_PIPE_BROKE = re.compile(r"^\[Errno (32|104)\] [^:]*$")
_OF_PIPES = re.compile(r"\b(multiprocessing|subprocess|std(in|out|err))\b|\bprint\(")
_OF_SOCKETS = re.compile(r"\b(sock\w*|ssl|http\w*|urllib\w*)\b|\.send(all)?\(")
"""Words in the frames of a traceback by which a pipe to a process of the rank's own, and a connection, are known."""
_NO_HOME = re.compile(r"Permission denied: '(/|/root/|/home/[^/']+/)\.\w")
_NO_USER = re.compile(r"getpwuid\(\): uid not found")
_NO_PROCESS = any_of(
    r"can't start new thread|pthread_create failed|Thread creation failed",
    r"[Cc]annot fork|fork\b.*Resource temporarily unavailable|BlockingIOError: Resource temporarily unavailable: ",
)
"""Words of Python, OpenBLAS, libgomp and shells for a process or thread that the kernel refuses, and the agent's for a rank."""
_FORKS = re.compile(r"\bfork(_exec)?\(|_execute_child|Popen\(")
_REMEDIES = (
    (_NO_COMPILER,
        "DeepSpeed compiles this operator when it is first used, and {compiler}: put `deepspeed.ops.__compatible_ops__ = {{}}` after the "
        'script\'s `import deepspeed`, and `"torch_adam": true` into optimizer.params of its configuration'),
    (re.compile(r"DataLoader worker .* killed by signal: Killed"), "{host_memory}"),
    (_SHARED_MEMORY, "{more_shared_memory}"),
    (re.compile(r"DataLoader worker .*Bus error"), "{more_shared_memory}"),
    (re.compile(r"ibv_\w+ failed with error Cannot allocate memory"), "{more_locked_memory}"),
    (re.compile(r"inotify (watch|instance) limit reached"),
        "raise fs.inotify.max_user_watches and fs.inotify.max_user_instances on that machine, or let fewer programs watch files"),
    (_NO_HOME, "{home}"),
    (_NO_USER, "set USER, LOGNAME and HOME in the job's env: this process runs as a uid that has no name in /etc/passwd"),
    (re.compile(r"\[Errno 13?\] (Permission denied|Operation not permitted): "),
        "check the owner and permissions of that folder: this process may not read or write there"),
    (re.compile(r"terminate called without an active exception(?!.*\bFile \")", re.DOTALL),
        "no line of Python ran any more: a thread of PyTorch's process group outlived the interpreter (pytorch issue 190489). "
        "End the script with `os._exit(0)` after flushing its output"),
    (any_of(
        r"(unrecognized arguments?:|No such option:?|not used by the HfArgumentParser:).*--local[_-]rank",
        r"Unknown command line flag 'local_rank'",
    ), "set script.localRank: false, so that ranks don't get --local_rank"),
    (re.compile(r"(required:|Missing option).*--local[_-]rank|has no attribute 'local_rank'"),
        "set script.localRank: true: each rank then gets --local_rank, as from DeepSpeed's launcher"),
    (re.compile(r"Default process group has not been initialized"),
        "call init_process_group before that; if the script waits for the --local_rank of DeepSpeed's launcher, "
        "set script.localRank: true"),
    (re.compile(r"^OSError: Exec format error: "),
        "its first line names no interpreter, such as #!/bin/sh, or it is for other machines: "
        "name what runs it: script.command: [bash, FILE]"),
    (re.compile(r"CUDA error: invalid device ordinal"), "use the GPU of LOCAL_RANK, not of RANK"),
    (re.compile(r"CERTIFICATE_VERIFY_FAILED"),
        "name a file with the certificate authority of that server in SSL_CERT_FILE and REQUESTS_CA_BUNDLE in spec.env"),
    (re.compile(r"ProxyError|Tunnel connection failed"), "correct HTTPS_PROXY and HTTP_PROXY in spec.env, or name that host in NO_PROXY"),
    (re.compile(r"find (them|it) in the cached files|OfflineModeIsEnabled|HF_HUB_OFFLINE"),
        "fetch it before, into a folder that HF_HOME names, or let the job reach the hub "
        "(HF_HUB_OFFLINE, HF_ENDPOINT, HTTPS_PROXY in spec.env)"),
    (re.compile(r"GatedRepo|gated repo"), "accept its terms with an account, and give the job the token of that account as HF_TOKEN"),
)  # fmt: skip
"""Advice by the words of an error; names in braces are fields of PlaceWords."""
_CONNECTING = re.compile(r"client socket has \w+ .*while trying to connect to \((?P<host>[^,\s]+), \d+\)")
"""torch's words for a store of a process group that can't be reached."""
_LOOPBACK = ("localhost", "127.", "::1")
_NOT_JOINED = re.compile(rf"Timed out waiting|{TIMED_OUT.pattern}", re.IGNORECASE)
"""Words for which Lockstep's trainer exits with HANG, whatever the exception is called."""
_BY_SIGNAL = {
    "SIGBUS": Cause.OUT_OF_MEMORY,  # a write to shared memory that has no room left
    **dict.fromkeys(("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"), Cause.KILLED),
    **dict.fromkeys(("SIGXCPU", "SIGSYS"), Cause.SETUP),  # a limit of CPU time; a system call that the container's profile forbids
    "SIGILL": Cause.SETUP,  # code for another CPU
    "SIGXFSZ": Cause.STORAGE,  # a limit of a file's size
}
"""Causes of signals that a program's own fault doesn't raise."""
_BY_CODE_OF_A_SHELL = {126: Cause.SETUP, 127: Cause.SETUP}
"""Causes of a program that may not be executed, or that isn't there."""
_TOLD_ON = ("SIGHUP", "SIGINT", "SIGILL", "SIGABRT", "SIGBUS", "SIGFPE", "SIGKILL", "SIGSEGV", "SIGTERM", "SIGXCPU", "SIGXFSZ", "SIGSYS")
_SIGNAL_OF_CODE: dict[int | None, str] = {
    **{256 - getattr(signals, name): name for name in ("SIGABRT", "SIGBUS", "SIGKILL", "SIGSEGV", "SIGTERM")},
    **{128 + getattr(signals, name): name for name in _TOLD_ON},
}
"""Signals by the exit code of a shell whose child they ended, and of a Python script that exits with its child's (negative) return code."""
_CHILD = any_of(
    r"<Signals\.(?P<python>SIG\w+)",
    r"terminated with signal (?P<spawn>SIG\w+)",
    r"Signal \d+ \((?P<elastic>SIG\w+)\) received",
    r"non-zero exit status (?P<status>\d+)",
    r"terminated with exit code (?P<code>\d+)",
    r"killed by signal: (?P<words>Killed|Terminated)",
)
"""Words in which Python's, torch's and a data loader's exceptions say that a child ended."""


def rank_cause(trainer: bool, exit_code: int | None, signal: str | None, raised: Raised | None, text: str) -> Cause:
    """Return the cause of a rank's end. `trainer`: it is Lockstep's, whose exit codes mean something; `raised`: what ended it; `text`: all
    its last lines.
    """
    by_itself = trainer_cause(exit_code, raised.exception if raised is not None else None) if trainer else None
    if by_itself is not None:
        return by_itself
    if trainer and exit_code == SAVED:
        return Cause.KILLED
    if trainer and exit_code is None and signal is None and _NOT_JOINED.search(raised.words if raised is not None else text):
        return Cause.HANG
    if raised is not None:
        cause = next((cause for each in blamable(raised) if (cause := _own_cause(each, text))), None)
    else:
        cause = next((cause for words in (_PLAIN_WORDS, _WORDS, _NATIVE_WORDS) if (cause := _by_words(words, text))), None)
    ended_by = signal or (signal_of(exit_code) if not trainer else None)
    if cause is Cause.USER_CODE and trainer:
        return Cause.INTERNAL
    of_shell = None if trainer else _BY_CODE_OF_A_SHELL.get(exit_code or 0)
    return cause or _BY_SIGNAL.get(ended_by or "") or of_shell or (Cause.INTERNAL if trainer else Cause.USER_CODE)


def blamable(raised: Raised) -> Iterator[Raised]:
    """The exception and what led to it. One that came while another was handled counts only if the other says nothing itself: a KeyError
    says something.
    """
    yield raised
    later = raised
    for before in raised.led_by:
        if not before.explicit and _EXCEPTIONS.get(later.exception) is Cause.USER_CODE:
            return
        yield before
        later = before


def signal_of(exit_code: int | None) -> str | None:
    """Signal that ended a script's child, by the code with which the script exits."""
    return _SIGNAL_OF_CODE.get(exit_code)


def is_killed(signal: str | None) -> bool:
    """Return True if somebody else sent the signal, whatever the rank had written before."""
    return _BY_SIGNAL.get(signal or "") is Cause.KILLED


def remedy(text: str, place: PlaceWords) -> str:
    """Advice about an error whose own words don't give it, to be put behind them; empty if nothing is known."""
    return next((f"; {what.format(**vars(place))}" for words, what in _REMEDIES if words.search(text)), "")


def is_of_another_master(words: str, addresses: Sequence[str]) -> bool:
    """Return True if a rank could not reach the store on a host by whose name none of the job's nodes goes: its script has set
    MASTER_ADDR.
    """
    match = _CONNECTING.search(words)
    if match is None:
        return False
    if match["host"].startswith(_LOOPBACK):
        return len(set(addresses)) > 1
    host = match["host"].partition(".")[0]
    return not host.isdigit() and ":" not in host and host not in {address.partition(".")[0] for address in addresses}


def lacks_processes(words: str, lines: str) -> bool:
    """Return True if an error says that no process or thread could be made. `lines`: what was written with it, which has the frames."""
    return _NO_PROCESS.search(words) is not None or ("BlockingIOError: [Errno 11]" in words and _FORKS.search(lines) is not None)


def trainer_cause(exit_code: int | None, exception: str | None) -> Cause | None:
    """Cause that Lockstep's own trainer decided; None: it met what it doesn't know, or was ended."""
    return _BY_EXIT_CODE.get(exit_code) or _BY_TRAINER_EXCEPTION.get(exception)


def _own_cause(raised: Raised, text: str) -> Cause | None:
    """Cause of this one exception; None: it says no more than that something failed."""
    words = raised.words
    if _MISUSE.search(words) or (_EXCEPTIONS.get(raised.exception) is Cause.SETUP and _OWN_IMPORT.search(raised.message)):
        return Cause.USER_CODE
    if _NO_USER.search(words):
        return Cause.SETUP
    if _PIPE_BROKE.search(raised.message) and _is_of_a_pipe(raised, text):
        return None
    if _EXCEPTIONS.get(raised.exception) is Cause.USER_CODE:
        return Cause.SETUP if _is_of_an_import(text) else Cause.USER_CODE
    if _NO_HOME.search(words) or (raised.exception in _OF_THE_SYSTEM and _NO_PROGRAM.search(text)):
        return Cause.SETUP
    return (
        _by_words(_PLAIN_WORDS, words)
        or (_EXCEPTIONS.get(raised.exception) if raised.exception not in _OF_A_CONNECTION else None)
        or _by_errno(raised.message)
        or (Cause.HANG if TIMED_OUT.search(words) else None)
        or (Cause.OUT_OF_MEMORY if _MEMORY_ERROR.search(raised.exception) else None)
        or _EXCEPTIONS.get(raised.exception)
        or _by_words(_WORDS, words)
        or _by_words(_NATIVE_WORDS, words)
        or _of_a_child(words)
        or (Cause.SETUP if _is_of_an_import(text) else None)
    )


def _is_of_a_pipe(raised: Raised, text: str) -> bool:
    """Return True if the other end was a process of the rank's own, not a peer: its end says no more than that it failed."""
    frames = text.rpartition("Traceback (most recent call last)")[2]
    return _OF_PIPES.search(frames) is not None or (raised.exception == "BrokenPipeError" and _OF_SOCKETS.search(frames) is None)


def _is_of_an_import(text: str) -> bool:
    """Return True if the last traceback passes through an installed package's import: it and the other packages don't fit each other."""
    return _IMPORTED.search(text.rpartition("Traceback (most recent call last)")[2]) is not None


def _by_errno(message: str) -> Cause | None:
    match = _ERRNO.search(message)
    if match is None:
        return None
    number = int(match["python"] or match["rust"])
    cause = next((cause for cause, numbers in _BY_ERRNO if number in numbers), None)
    if cause is None and (match["path"] or match["rust"]):
        return None if number in _OF_A_PATH else Cause.STORAGE
    return cause or next((cause for cause, numbers in _BY_ERRNO_OF_A_CONNECTION if number in numbers), None)


def _of_a_child(words: str) -> Cause | None:
    match = _CHILD.search(words)
    if match is None:
        return None
    code = int(match["status"] or match["code"] or 0)
    signal = match["python"] or match["spawn"] or match["elastic"] or signal_of(code)
    return Cause.KILLED if match["words"] else _BY_SIGNAL.get(signal or "") or _BY_CODE_OF_A_SHELL.get(code)


def _by_words(table: tuple[tuple[Cause, re.Pattern[str]], ...], text: str) -> Cause | None:
    return next((cause for cause, words in table if words.search(text)), None)
