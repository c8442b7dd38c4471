"""Faults of scripts that were written elsewhere, of their files, and of the environment that they are started in."""

from __future__ import annotations

from typing import Any

from corpus.of_processes import CORRECT, LIMIT, RankFault, raises
from corpus.verdicts import Expected

LACKS = "the environment lacks"
WHO_KILLED = "find out who did"
GLOO = "torch, dist = ranks_talk()\n"
NO_HARM = Expected("", "", "", state="Complete")
STEPS = "for step in range(4, 1000): steps(step, step)\n"
TALK_ON = "while True: dist.all_reduce(torch.ones(1))\n"


def _one(cause: str, says: str, remedy: str, never: str = "", rank: int | None = 1) -> Expected:
    return Expected(cause, says, remedy, rank=rank, node=rank, never=never)


def _all(cause: str, says: str, remedy: str, never: str = "") -> Expected:
    return Expected(cause, says, remedy, everybody=True, never=never)


def _env(**values: str) -> dict[str, Any]:
    return {"env": [{"name": name, "value": value} for name, value in values.items()]}


SCRIPT_FAULTS = (
    # Signals and ends of native code.
    RankFault("illegal", "native code was built for another processor (SIGILL)", _one("Setup", "SIGILL", f"{LACKS}|processor|CPU"),
        "if RANK == 1: os.kill(os.getpid(), signal.SIGILL)\nwait()"),
    RankFault("native-exception", "C++ throws, and no one catches it", _one("UserCode", "out_of_range", CORRECT), """\
if RANK == 1:
    sys.stderr.write("terminate called after throwing an instance of 'std::out_of_range'\\n  what():  vector::_M_range_check: \
__n (which is 9) >= this->size() (which is 4)\\n"); sys.stderr.flush()
    os.abort()
wait()
"""),
    RankFault("mapped-file", "a mapped file became shorter (SIGBUS)",
        _one("OutOfMemory", "SIGBUS", "(?i)mapped file|file .*(shorter|cut|truncated)"), """\
import mmap
if RANK == 1:
    with open("tokens.bin", "wb") as file: file.write(bytes(1 << 20))
    file = open("tokens.bin", "r+b"); tokens = mmap.mmap(file.fileno(), 0); os.truncate("tokens.bin", 0)
    print(tokens[1 << 19])
wait()
"""),
    RankFault("interrupted", "one rank is interrupted (SIGINT)", _one("Killed", "SIGINT|KeyboardInterrupt", WHO_KILLED),
        "if RANK == 1: os.kill(os.getpid(), signal.SIGINT); wait(1)\nwait()"),
    RankFault("alarm", "a timer of the script's own ends it (SIGALRM)", _one("UserCode", "SIGALRM", CORRECT),
        "if RANK == 1: signal.alarm(1)\nwait()"),
    # Threads, children, hooks.
    RankFault("thread-dies", "a thread that reads data dies, and the script waits for its queue",
        _one("Hang", "ValueError: bad record", "stacks"), """\
import queue
records = queue.Queue()
def read():
    if RANK == 1: raise ValueError("bad record")
    while True: records.put(1); time.sleep(0.05)
threading.Thread(target=read, daemon=True).start()
for step in range(4, 1000): records.get(); steps(step, step)
""", LIMIT),
    RankFault("thread-stays", "the script fails, and a thread that isn't a daemon keeps its process",
        _one("Hang", "ValueError: bad label", "stacks"), """\
threading.Thread(target=wait).start()
if RANK == 1: raise ValueError("bad label")
for step in range(4, 1000): steps(step, step)
""", LIMIT),
    RankFault("exit-hook-hangs", "a rank is done, and its exit hook doesn't end", _one("Hang", "rank 1 .*hangs", "stacks"),
        "import atexit\nif RANK == 1: atexit.register(wait)\n", LIMIT),
    RankFault("own-hook", "an exception hook of the script's own hides the traceback",
        _one("UserCode", "(?s)exited with 1.*see the error tracker", CORRECT), """\
sys.excepthook = lambda *_: print("fatal: see the error tracker", flush=True)
if RANK == 1: raise ValueError("bad label")
wait()
"""),
    RankFault("boxed", "a traceback in a box, as rich draws it", _one("UserCode", "ValueError: bad label", CORRECT), """\
import rich.traceback
rich.traceback.install(show_locals=True)
if RANK == 1: raise ValueError("bad label")
wait()
"""),
    RankFault("logged", "the script logs its exception, line by line with a prefix, and exits with 1",
        _one("UserCode", "KeyError: 'tokens'", CORRECT), """\
import logging
class Prefixed(logging.Formatter):
    def format(self, record): return "\\n".join("2026-11-29 04:00:00 | ERROR | " + line for line in super().format(record).splitlines())
handler = logging.StreamHandler(); handler.setFormatter(Prefixed()); logging.getLogger().addHandler(handler)
if RANK == 1:
    try: {}["tokens"]
    except KeyError: logging.exception("training failed"); sys.exit(1)
wait()
"""),
    RankFault("wrapper", "a wrapper's program dies, and the wrapper doesn't look", _one("Hang", "rank 1 .*hangs", "stacks"), """\
if RANK == 1: subprocess.Popen([sys.executable, "-c", "import os; os.abort()"]); wait()
""" + STEPS, LIMIT),
    RankFault("output-held", "a rank ends, and its child keeps the output open", _one("UserCode", "exited with 3", CORRECT), """\
if RANK == 1: subprocess.Popen(["sleep", "600"], start_new_session=True); os._exit(3)
wait()
"""),
    RankFault("output-closed", "a rank closes its output, then fails", _one("UserCode", "exited with 1", CORRECT),
        "if RANK == 1: os.close(1); os.close(2); raise ValueError('bad label')\nwait()"),
    RankFault("pool", "a worker of a process pool is killed", _one("Killed", "terminated abruptly", f"{WHO_KILLED}|memory"), """\
import concurrent.futures, multiprocessing
if RANK == 1:
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        pool.submit(os.kill, 0, 0).result()
        pool.submit(os._exit, 9).result()
wait()
"""),
    RankFault("no-main-guard", "the script starts processes by spawn, and has no main guard",
        _all("UserCode", "bootstrapping phase", CORRECT), """\
import multiprocessing
multiprocessing.set_start_method("spawn", force=True)
child = multiprocessing.Process(target=print); child.start(); child.join(); sys.exit(child.exitcode)
"""),
    RankFault("file-lock", "a rank waits for a file lock that its peer holds in a collective operation",
        _one("Hang", "rank 1 .*hangs", "stacks"), GLOO + """\
import fcntl
lock = open("cache.lock", "w")
if RANK == 0: fcntl.flock(lock, fcntl.LOCK_EX)
dist.barrier()
if RANK == 1: fcntl.flock(lock, fcntl.LOCK_EX)
dist.all_reduce(torch.ones(1))
""", LIMIT),
    # What is printed and reported.
    RankFault("binary", "a rank prints NULs, terminal codes and bytes that aren't UTF-8, then fails",
        _one("UserCode", "ValueError: bad label", CORRECT), """\
if RANK == 1:
    os.write(1, bytes(range(256)) * 40 + b"\\x1b[2J\\x1b]0;title\\x07\\xff\\xfe\\n")
    raise ValueError("bad label")
wait()
"""),
    RankFault("endless-line", "a rank prints 8 MB without an end of line, then fails", _one("UserCode", "ValueError: bad label", CORRECT),
        "if RANK == 1: sys.stdout.write('x' * (8 << 20)); sys.stdout.flush(); raise ValueError('bad label')\nwait()"),
    RankFault("bad-reports", "a rank's reports aren't what they should be, then it fails",
        _one("UserCode", "ValueError: bad label", CORRECT), """\
for text in (b"", b"\\x00\\xff", b"[]", b"{", b'{"rank": 0, "event": "step", "step": -5}', b'{"rank": 1, "event": "step", "step": "NaN"}',
             b'{"rank": 7, "event": "step", "step": 9}', b'{"rank": 1, "event": "step", "step": 99999999999999999999999}',
             b'{"rank": 1, "event": "step", "step": 4, "metrics": {"loss": NaN}}', b"[" * 9000):
    _report.send(text)
time.sleep(0.5)
if RANK == 1: raise ValueError("bad label")
wait()
"""),
    RankFault("ascii", "the script prints what the stated encoding doesn't have", _all("UserCode", "UnicodeEncodeError", CORRECT),
        "print('gr\\u00f6\\u00dfe')", _env(PYTHONIOENCODING="ascii")),
    # Python, its modules and the script as a file.
    RankFault("not-utf-8", "the script was saved in Latin-1", _all("UserCode", "Non-UTF-8|SyntaxError", CORRECT),
        b"message = 'gr\xf6\xdfe'\n", whole=True),
    RankFault("tabs", "the script mixes tabs and spaces", _all("UserCode", "TabError", CORRECT), b"if True:\n        a = 1\n\tb = 2\n",
        whole=True),
    RankFault("shadowed", "a file beside the script has the name of a library", _all("UserCode", "random", CORRECT),
        "import random\nrandom.seed(7)\nwait()", files={"random.py": "SEED = 7\n"}),
    RankFault("poisoned", "PYTHONPATH has modules of another Python", _all("Setup", "another Python", LACKS), "",
        _env(PYTHONPATH="{folder}/other"), files={"other/ctypes.py": "raise ImportError('this ctypes is of another Python')\n"}),
    RankFault("python-home", "PYTHONHOME names a folder that isn't Python's", _all("Setup", "encodings", LACKS), "wait()",
        _env(PYTHONHOME="/nowhere")),
    RankFault("script-gone", "the script is deleted while it runs, and fails",
        _all("Configuration", "script.py", "put it there|change what the message names"),
            "if RANK == 1:\n    os.remove(sys.argv[0]); raise ValueError('bad label')\nwait()", {"restart": {"maxRestarts": 1}}),
    RankFault("asks", "the script asks a question, and there is no terminal", _all("UserCode", "EOFError", CORRECT),
        "input('Continue? [y/N] ')"),
    # The environment.
    RankFault("locale", "the image lacks the locale that is asked for", _all("Setup", "unsupported locale setting", LACKS),
        "import locale\nlocale.setlocale(locale.LC_ALL, '')", _env(LC_ALL="de_XX.UTF-8")),
    RankFault("no-time-zones", "the image has no time zones", _all("Setup", "No time zone found with key Europe/Vienna", LACKS),
        "import zoneinfo\nsys.modules['tzdata'] = None\nzoneinfo.ZoneInfo('Europe/Vienna')", _env(PYTHONTZPATH="/nowhere")),
    RankFault("no-user", "the pod's uid has no name, as on OpenShift", _one("Setup", "uid not found", "USER|LOGNAME|HOME"), """\
import getpass
if RANK == 1:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"): os.environ.pop(name, None)
    os.setuid(1000680000); getpass.getuser()
wait()
"""),
    RankFault("exec-missing", "the script replaces itself by a program that isn't there", _one("Setup", "No such file or directory", LACKS),
        "if RANK == 1: os.execvp('accelerate-9', ['accelerate-9', 'launch'])\nwait()"),
    RankFault("not-a-library", "a shared library is a text file, as Git LFS leaves it",
        _one("Setup", "invalid ELF header|file too short", LACKS),
            "if RANK == 1:\n    open('fused.so', 'w').write('version https://git-lfs.github.com/spec/v1\\n' * 99);"
            " ctypes.CDLL('./fused.so')\nwait()"),
    RankFault("protobuf", "packages of the image don't fit each other", _one("Setup", "Descriptors cannot be created directly", LACKS),
        "sys.path.insert(0, sys.path[0] + '/site-packages')\nif RANK == 1: import old_pb2\nwait()",
            files={"site-packages/old_pb2.py": "raise TypeError('Descriptors cannot be created directly.\\\\nIf this call came from a"
                                               " _pb2.py file, your generated code is out of date.')\n"}),
    RankFault("unset", "a shell script uses a variable that isn't set", _one("Setup", "DATA_ROOT: unbound variable", LACKS),
        "if RANK == 1: sys.exit(subprocess.run(['bash', '-euc', 'ls $DATA_ROOT']).returncode)\nwait()"),
    RankFault("carriage-returns", "a shell script was saved on Windows", _one("Setup", "bad interpreter|prepare.sh", LACKS), """\
if RANK == 1:
    open("prepare.sh", "wb").write(b"#!/bin/bash\\r\\necho ready\\r\\n"); os.chmod("prepare.sh", 0o755)
    sys.exit(subprocess.run(["bash", "-c", "./prepare.sh"]).returncode)
wait()
"""),
    RankFault("watches", "the kernel has no more inotify watches", _one("Setup", "inotify", "inotify|limit", never="make room"),
        raises("OSError(28, 'inotify watch limit reached')")),
    RankFault("no-locks", "the volume can't lock files", _one("Storage", "not supported", "volume"),
        raises("OSError(95, 'Operation not supported', '/workspace/cache.lock')")),
    # The run's own files.
    RankFault("logs-deleted", "the run's logs are deleted, then a rank fails", _one("UserCode", "ValueError: bad label", CORRECT), """\
import pathlib, shutil
if RANK == 1:
    shutil.rmtree(pathlib.Path(os.environ["LOCKSTEP_RUN"]).parent / "logs", ignore_errors=True)
    shutil.rmtree("runs/faulty/logs", ignore_errors=True)
    time.sleep(1); raise ValueError("bad label")
wait()
"""),
    RankFault("run-deleted", "the run's folder is deleted, and the script goes on to its end", NO_HARM,
        "import shutil\nif RANK == 1: shutil.rmtree('runs/faulty', ignore_errors=True)\nsteps(4, 24)"),
    # What ranks say to each other.
    RankFault("master", "the script names a MASTER_ADDR that no longer exists", _all("Setup", "old-head-node", LACKS),
        "import datetime\nimport torch.distributed as dist\nos.environ['MASTER_ADDR'] ="
        " 'old-head-node.invalid'\ndist.init_process_group('gloo', timeout=datetime.timedelta(seconds=3))"),
    RankFault("world-size", "a rank believes in a larger world than its peer",
        _all("Hang", "rank [01] .*hangs|every rank waits|all ranks wait", "stacks"),
            "if RANK == 1: os.environ['WORLD_SIZE'] = '4'\n" + GLOO + TALK_ON, LIMIT),
    RankFault("unlike-shapes", "ranks reduce tensors of different shapes", _all("UserCode", "enforce fail|nbytes|length", CORRECT),
        GLOO + "while True: dist.all_reduce(torch.ones(4 << 3 * RANK)); steps(4, 4)\n"),
    RankFault("uneven", "a rank has fewer batches, and waits elsewhere than its peer",
        _all("Hang", "rank [01] .*hangs|every rank waits|all ranks wait", "stacks"), GLOO + """\
for step in range(4, 10 - 4 * RANK): dist.all_reduce(torch.ones(1)); steps(step, step)
dist.broadcast_object_list([None], src=1 - RANK)
wait()
""", LIMIT),
    RankFault("monitored", "a rank doesn't come to a barrier, and its peer names it",
        _one("Hang", "rank 1 .*hangs|[Rr]ank 1 failed to pass", "stacks"), """\
import datetime
""" + GLOO + """\
if RANK == 1: wait()
dist.monitored_barrier(timeout=datetime.timedelta(seconds=2))
"""),
    RankFault("no-samples", "the dataset is empty", _one("UserCode", "num_samples=0", CORRECT),
        "import torch.utils.data\nif RANK == 1: torch.utils.data.DataLoader([], shuffle=True)\nwait()"),
)  # fmt: skip
