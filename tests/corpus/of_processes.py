"""Faults of ranks and agents, which two nodes on one machine show as well as a cluster does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from corpus.verdicts import Expected, Fault

TORCH = "import torch, torch.distributed\n"
"""Imported before the first step: a busy machine takes longer for it than a step may take."""
RANKS = """\
import ctypes, json, os, re, signal, socket, subprocess, sys, threading, time
RANK = int(os.environ["RANK"])
_report = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
_report.connect(os.environ["LOCKSTEP_REPORT_SOCKET"])
def tell(**what): _report.send(json.dumps({"rank": RANK, **what}).encode())
def steps(first, last):
    for step in range(first, last + 1):
        tell(event="step", step=step, totalSteps=1000)
        time.sleep(0.05)
def wait(seconds=120): time.sleep(seconds)
def ranks_talk():
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    return torch, dist
steps(1, 3)
"""
"""What every script begins with."""


@dataclass(frozen=True)
class RankFault(Fault):
    """A script of two ranks on two nodes, in which one does something."""

    script: str | bytes = ""
    fields: dict[str, Any] = field(default_factory=dict)
    """More of the job's spec."""
    files: dict[str, str] = field(default_factory=dict)
    """Texts of files beside the script."""
    whole: bool = False
    """The script doesn't begin as the others do."""


def raises(exception: str) -> str:
    return f"if RANK == 1: raise {exception}\nwait()"


def _of(cause: str, says: str, remedy: str, **who: Any) -> Expected:
    return Expected(cause, says, remedy, **({"rank": 1, "node": 1} | who))


CORRECT = "correct it first"
LIMIT: dict[str, Any] = {"hangTimeouts": {"stepSeconds": 5}}
BOTH_WAIT = "network between them"

RANK_FAULTS = (
    RankFault("exception", "a rank raises an exception", _of("UserCode", "RuntimeError: boom", CORRECT), raises("RuntimeError('boom')")),
    RankFault("exit-code", "a rank exits with 3 and says nothing", _of("UserCode", "exited with 3", CORRECT),
        "if RANK == 1: sys.exit(3)\nwait()"),
    RankFault("exit-message", "a rank calls sys.exit with a sentence", _of("UserCode", "no such split: dev", CORRECT),
        "if RANK == 1: sys.exit('no such split: dev')\nwait()"),
    RankFault("early-end", "a rank returns in the middle, the others go on",
        _of("UserCode", "rank 1 .*exited with 0|ended before", CORRECT), """\
torch, dist = ranks_talk()
if RANK == 1: os._exit(0)
while True: dist.all_reduce(torch.ones(1))
"""),
    RankFault("first-of-two", "a rank fails; its peer then fails for want of it", _of("UserCode", "ValueError: bad label", CORRECT), """\
torch, dist = ranks_talk()
for step in range(4, 100):
    if RANK == 1 and step == 8: raise ValueError("bad label")
    dist.all_reduce(torch.ones(1)); steps(step, step)
"""),
    RankFault("peer-is-quicker", "a rank fails slowly; its peer is gone before it", _of("UserCode", "KeyError: 'tokens'", CORRECT), """\
torch, dist = ranks_talk()
dist.all_reduce(torch.ones(1))
if RANK == 1:
    import atexit
    atexit.register(time.sleep, 2)
    dist.destroy_process_group()
    raise KeyError("tokens")
while True: dist.all_reduce(torch.ones(1))
"""),
    RankFault("rank-0", "rank 0 fails, with the others waiting for it", _of("UserCode", "ZeroDivisionError", CORRECT, rank=0, node=0), """\
torch, dist = ranks_talk()
if RANK == 0: 1 / 0
while True: dist.all_reduce(torch.ones(1))
"""),
    RankFault("killed", "SIGKILL by hand", _of("Killed", "SIGKILL", "find out who did"),
        "if RANK == 1: os.kill(os.getpid(), signal.SIGKILL)\nwait()"),
    RankFault("terminated", "SIGTERM of somebody else", _of("Killed", "SIGTERM", "find out who did"),
        "if RANK == 1: os.kill(os.getpid(), signal.SIGTERM)\nwait()"),
    RankFault("segfault", "native code reads a null pointer", _of("UserCode", "SIGSEGV", CORRECT),
        "if RANK == 1: ctypes.string_at(0)\nwait()"),
    RankFault("abort", "native code aborts", _of("UserCode", "SIGABRT", CORRECT), "if RANK == 1: os.abort()\nwait()"),
    RankFault("shared-memory", "shared memory is full (SIGBUS)", _of("OutOfMemory", "SIGBUS", "shm|shared memory"),
        "if RANK == 1: os.kill(os.getpid(), signal.SIGBUS)\nwait()"),
    RankFault("memory-error", "Python gets no memory", _of("OutOfMemory", "MemoryError", "memory"),
        "if RANK == 1: bytearray(1 << 60)\nwait()"),
    RankFault("gpu-memory", "a GPU's memory runs out", _of("OutOfMemory", "CUDA out of memory", "microBatchSize|smaller batch"), """\
class OutOfMemoryError(RuntimeError): pass
""" + raises("OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB')")),
    RankFault("disk-full", "the volume is full", _of("Storage", "No space left", "room"),
        raises("OSError(28, 'No space left on device', '/workspace/out')")),
    RankFault("disk-quota", "the disk quota is used up", _of("Storage", "quota", "room"),
        raises("OSError(122, 'Disk quota exceeded', '/workspace/out')")),
    RankFault("io-error", "the volume gives I/O errors", _of("Storage", "Input/output error", "volume"),
        raises("OSError(5, 'Input/output error', '/workspace/out')")),
    RankFault("read-only", "the volume became read-only", _of("Storage", "Read-only", "volume"),
        raises("OSError(30, 'Read-only file system', '/workspace/out')")),
    RankFault("stale-handle", "an NFS server forgot a file", _of("Storage", "Stale file handle", "volume"),
        raises("OSError(116, 'Stale file handle', '/workspace/out')")),
    RankFault("no-module", "a package is missing in the image", _of("Setup", "No module named 'flash_attn_9'", "the environment lacks"),
        "if RANK == 1: import flash_attn_9\nwait()"),
    RankFault("no-library", "a shared library is missing", _of("Setup", "libcudnn", "the environment lacks"),
        raises("OSError('libcudnn.so.9: cannot open shared object file: No such file or directory')")),
    RankFault("no-program", "a program is missing", _of("Setup", "ninja", "the environment lacks"),
        "if RANK == 1: subprocess.run(['ninja-9', '--version'])\nwait()"),
    RankFault("old-driver", "the driver is too old for this CUDA",
        _of("Setup", "driver version is insufficient", "the environment lacks|driver"),
            raises("RuntimeError('CUDA error: CUDA driver version is insufficient for CUDA runtime version')")),
    RankFault("no-kernel", "torch has no code for this GPU", _of("Setup", "no kernel image", "the environment lacks|GPU"),
        raises("RuntimeError('CUDA error: no kernel image is available for execution on the device')")),
    RankFault("open-files", "too many open files", _of("Setup", "Too many open files", "the environment lacks|limit"),
        raises("OSError(24, 'Too many open files', '/workspace/x')")),
    RankFault("ecc", "a GPU has an uncorrectable memory error", _of("Hardware", "uncorrectable ECC", "node"),
        raises("RuntimeError('CUDA error: uncorrectable ECC error encountered')")),
    RankFault("gpu-lost", "a GPU fell off the bus", _of("Hardware", "fallen off the bus|unknown error|GPU is lost", "node"),
        raises("RuntimeError('CUDA error: GPU is lost. Reboot the system to recover this GPU')")),
    RankFault("nccl-peer", "NCCL lost its peer, and nobody says why", _of("Fabric", "NCCL error", "fabric", rank=1), """\
class DistBackendError(RuntimeError): pass
""" + raises("DistBackendError('NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error, "
    "NCCL version 2.29.3\\\\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.')")),
    RankFault("port-taken", "the rendezvous port is taken", _of("Setup", "EADDRINUSE|address already in use", "port|environment"),
        raises("RuntimeError('The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98,"
               " name: EADDRINUSE, message: address already in use')")),
    RankFault("old-traceback", "an old traceback of a child, then sys.exit(1)",
        _of("UserCode", "exited with 1(?!: ValueError)", CORRECT), """\
if RANK == 1:
    subprocess.run([sys.executable, "-c", "raise ValueError('a tokenizer that is tried first')"])
    for step in range(4, 60): steps(step, step)
    sys.exit(1)
wait()
"""),
    RankFault("worker-killed", "a data loader's worker is killed", _of("OutOfMemory", "killed by signal: Killed", "memory"),
        raises("RuntimeError('DataLoader worker (pid 4711) is killed by signal: Killed. ')")),
    RankFault("worker-bus", "a data loader's worker has no shared memory",
        _of("OutOfMemory", "insufficient shared memory", "shm|shared memory"),
            raises("RuntimeError('DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that dataloader workers are"
                   " out of shared memory. Please try to raise your shared memory limit. insufficient shared memory (shm)')")),
    RankFault("sleeps", "a rank doesn't come to its next step", _of("Hang", "rank 1 .*hangs", "stacks"), """\
torch, dist = ranks_talk()
if RANK == 1: wait()
dist.all_reduce(torch.ones(1))
""", LIMIT),
    RankFault("frozen", "a rank is stopped (SIGSTOP)", _of("Hang", "is stopped", "stacks|kill -CONT"),
        "if RANK == 1: os.kill(os.getpid(), signal.SIGSTOP)\nfor step in range(4, 1000): steps(step, step)", LIMIT),
    RankFault("native-loop", "native code keeps the interpreter's lock", _of("Hang", "rank 1 .*hangs", "stacks"),
        "if RANK == 1: re.match('(a*)*b', 'a' * 64)\nfor step in range(4, 1000): steps(step, step)", LIMIT),
    RankFault("deadlock", "a rank waits for a lock that it holds", _of("Hang", "rank 1 .*hangs", "stacks"), """\
if RANK == 1:
    lock = threading.Lock(); lock.acquire(); lock.acquire()
for step in range(4, 1000): steps(step, step)
""", LIMIT),
    RankFault("nobody-to-blame", "both ranks wait for each other",
        _of("Hang", "every rank waits|all ranks wait|network between", "stacks", rank=None, node=None), """\
torch, dist = ranks_talk()
dist.recv(torch.ones(1), src=1 - RANK)
""", LIMIT),
    RankFault("agent-killed", "node 1's agent is killed",
        _of("NodeLost", "node 1 .*agent ended or its connection closed", "node", rank=None),
            "if RANK == 1: os.kill(os.getppid(), signal.SIGKILL)\nwait()"),
    RankFault("agent-frozen", "node 1's agent is stopped (SIGSTOP)", _of("NodeLost", "agent is stopped or gets no CPU", "node", rank=None),
        "if RANK == 1: os.kill(os.getppid(), signal.SIGSTOP)\nwait()"),
    RankFault("syntax", "the script has a syntax error", _of("UserCode", "SyntaxError", CORRECT, rank=None, node=None, everybody=True),
        "def f(:\n  pass"),
    RankFault("nan", "a script stops because its loss is NaN", _of("NonFinite", "nan", "learningRate|learning rate"),
        raises("FloatingPointError('loss is nan at step 4')")),
    RankFault("shape", "a wrong shape", _of("UserCode", "mat1 and mat2", CORRECT),
        raises("RuntimeError('mat1 and mat2 shapes cannot be multiplied (4x8 and 16x8)')")),
    RankFault("no-data", "data are missing", _of("UserCode", "No such file or directory: '/datasets/x.jsonl'", CORRECT),
        "if RANK == 1: open('/datasets/x.jsonl')\nwait()"),
    RankFault("address-resolution", "a name can't be resolved (DNS)", _of("Setup", "name resolution", "environment"),
        raises("socket.gaierror(-3, 'Temporary failure in name resolution')")),
    RankFault("raised-from", "a full volume, told by an exception that was raised from it",
        _of("Storage", "from OSError: .*No space left", "room"), """\
if RANK == 1:
    try: raise OSError(28, "No space left on device", "/workspace/out")
    except OSError as error: raise RuntimeError("the batch was not written") from error
wait()
"""),
    RankFault("group", "a full volume, in a group of exceptions", _of("Storage", "ExceptionGroup: .*No space left", "room"),
        raises("ExceptionGroup('shards', [OSError(28, 'No space left on device', '/workspace/a'), ValueError('b')])")),
    RankFault("handled-before", "a GPU's memory ran out, which was handled and written; then a bug",
        _of("UserCode", "ValueError: bad label", CORRECT), """\
import logging
if RANK == 1:
    try: raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    except RuntimeError: logging.exception("again with a smaller batch")
    raise ValueError("bad label")
wait()
"""),
    RankFault("handled-then-killed", "an exception was handled and written; then SIGKILL by hand",
        _of("Killed", "SIGKILL", "find out who did"), """\
import traceback
if RANK == 1:
    try: 1 / 0
    except ZeroDivisionError: traceback.print_exc()
    os.kill(os.getpid(), signal.SIGKILL)
wait()
"""),
    RankFault("long-hooks", "exit hooks write more than is kept, after the exception",
        _of("UserCode", "ValueError: bad label", CORRECT), """\
import atexit
if RANK == 1:
    atexit.register(lambda: [print("uploading", number, flush=True) for number in range(60)])
    raise ValueError("bad label")
wait()
"""),
    RankFault("consequence-first", "a rank fails for want of its peer, which dies of a bug 0.1 s later",
        _of("UserCode", "ValueError: bad label", CORRECT), """\
class DistBackendError(RuntimeError): pass
if RANK == 0: time.sleep(0.2); raise DistBackendError("store->get('0') got error: Connection was likely closed. \
Did the remote server shutdown or crash?")
time.sleep(0.3); raise ValueError("bad label")
"""),
    RankFault("silent-cause", "likewise, and the peer ends without a word", _of("UserCode", "exited with 3", CORRECT), """\
if RANK == 0: time.sleep(0.2); raise ConnectionResetError(104, "Connection reset by peer")
time.sleep(0.7); os._exit(3)
"""),
    RankFault("shell-code", "a script's program is killed, and the script exits with its code",
        _of("Killed", "137, .*SIGKILL", "find out who did"),
            "if RANK == 1: sys.exit(subprocess.run(['bash', '-c', 'sleep 9 & kill -9 $!; wait $!']).returncode)\nwait()"),
    RankFault("child-killed", "a script's program is killed, and the script raises", _of("Killed", "SIGKILL", "find out who did"),
        "if RANK == 1: subprocess.run(['bash', '-c', 'kill -9 $$'], check=True)\nwait()"),
    RankFault("no-command", "a shell finds no such program", _of("Setup", "127", "the environment lacks"),
        "if RANK == 1: sys.exit(subprocess.run(['sh', '-c', 'accelerate-9 launch']).returncode)\nwait()"),
    RankFault("native-memory", "C++ gets no memory", _of("OutOfMemory", "bad_alloc", "fewer ranks on it"), """\
if RANK == 1:
    sys.stderr.write("terminate called after throwing an instance of 'std::bad_alloc'\\n  what():  std::bad_alloc\\n"); sys.stderr.flush()
    os.abort()
wait()
"""),
    RankFault("array-memory", "numpy gets no memory", _of("OutOfMemory", "Unable to allocate", "fewer ranks on it"),
        "if RANK == 1:\n    import numpy\n    numpy.ones(1 << 58)\nwait()"),
    RankFault("full-shm", "a file of shared memory has no room", _of("OutOfMemory", "psm_4711", "shm"),
        raises("OSError(28, 'No space left on device', '/dev/shm/psm_4711')")),
    RankFault("cpu-limit", "a limit of CPU time (ulimit -t)", _of("Setup", "SIGXCPU .*ulimit -t", "the environment lacks"), """\
import resource
if RANK == 1:
    resource.setrlimit(resource.RLIMIT_CPU, (1, 9))
    while True: pass
wait()
"""),
    RankFault("not-allowed", "a folder may not be written", _of("Storage", "Permission denied", "permissions of that folder"),
        raises("PermissionError(13, 'Permission denied', '/workspace/runs/x')")),
    RankFault("no-home", "the pod's user has no home", _of("Setup", "Permission denied", "set HOME"),
        raises("PermissionError(13, 'Permission denied', '/.triton')")),
    RankFault("server-away", "a volume's server doesn't answer", _of("Storage", "timed out", "volume"),
        raises("TimeoutError(110, 'Connection timed out', '/datasets/shard-3.arrow')")),
    RankFault("evicted-client", "a Lustre server has evicted the node", _of("Storage", "transport endpoint shutdown", "volume"),
        raises("BrokenPipeError(108, 'Cannot send after transport endpoint shutdown', '/lustre/x')")),
    RankFault("service-away", "a service outside the job refuses the connection",
        _of("Setup", "Connection refused", "the environment lacks"),
            "import urllib.request\nif RANK == 1: urllib.request.urlopen('http://127.0.0.1:9/')\nwait()"),
    RankFault("nccl-misuse", "NCCL is asked for what can't be", _of("UserCode", "invalid usage", CORRECT), """\
class DistBackendError(RuntimeError): pass
""" + raises("DistBackendError('NCCL error in: ProcessGroupNCCL.cpp:3690, invalid usage, NCCL version 2.29.3\\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\\n"
    "Last error:\\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 3b000')")),
    RankFault("nccl-memory", "NCCL gets no memory of a GPU",
        _of("OutOfMemory", "out of memory|unhandled cuda error", "microBatchSize"), """\
class DistBackendError(RuntimeError): pass
""" + raises("DistBackendError(\"NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.29.3\\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\\nLast error:\\nCuda failure 2 'out of memory'\")")),
    RankFault("own-import", "a module of the script's own lacks a name", _of("UserCode", "cannot import name", CORRECT),
        "open('batches.py', 'w').close()\nsys.path.insert(0, '.')\nif RANK == 1: from batches import collate\nwait()"),
    RankFault("anomaly", "autograd meets NaN", _of("NonFinite", "nan values", "learningRate"),
        raises("RuntimeError(\"Function 'MulBackward0' returned nan values in its 0th output.\")")),
    RankFault("done-too-early", "a rank is done, and the others wait for it for ever",
        _of("UserCode", "exited with 0 while others still needed it", CORRECT), """\
import datetime
torch, dist = ranks_talk()
if RANK == 1: os._exit(0)
dist.distributed_c10d._store_based_barrier(0, dist.distributed_c10d._get_default_store(), "step", 2, datetime.timedelta(seconds=600))
""", LIMIT),
    RankFault("does-not-join", "a rank doesn't come to where the others have waited for it long enough",
        _of("Hang", "rank 1 .*hangs", "stacks"), """\
import datetime, torch, torch.distributed as dist
if RANK == 1: wait()
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
"""),
    RankFault("agent-0-killed", "the agent with the coordinator is killed",
        _of("NodeLost", "node 0's agent was killed", "node", rank=None, node=0),
            "if RANK == 0: os.kill(os.getppid(), signal.SIGKILL)\nwait()"),
)  # fmt: skip
