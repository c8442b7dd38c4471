"""What a rank's output says of its end: the exception that ended it, and those that led to it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lockstep_gang.agent.ranks import relay as relay_module
from lockstep_gang.agent.ranks.relay import Relay
from lockstep_gang.lifecycle.tracebacks import LEFT_OUT, Raised, raised_in

LAST_LINES = 20

FULL = "OSError(28, 'No space left on device', '/w/x')"
FULL_WORDS = "[Errno 28] No space left on device: '/w/x'"


def written(code: str) -> list[str]:
    """What Python itself writes when this ends it, as a rank's agent reads it: without empty lines."""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return [line for line in done.stderr.splitlines() if line.strip()]


PYTHON = {
    "alone": ("raise ValueError('bad label')", Raised("ValueError", "bad label")),
    "without words": ("raise NotImplementedError", Raised("NotImplementedError")),
    "any name": ("class bad(Exception): pass\nraise bad('no')", Raised("bad", "no")),
    "several lines": ("raise RuntimeError('one\\n  two')", Raised("RuntimeError", "one\n  two")),
    "an empty first line": ("raise RuntimeError('\\n  CUDA Setup failed')", Raised("RuntimeError", "\n  CUDA Setup failed")),
    "raised from": (
        f"try: raise {FULL}\nexcept OSError as e: raise RuntimeError('no batch') from e",
        Raised("RuntimeError", "no batch", (Raised("OSError", FULL_WORDS),)),
    ),
    "while handling": (
        "try: raise KeyError('x')\nexcept KeyError: raise RuntimeError('no batch')",
        Raised("RuntimeError", "no batch", (Raised("KeyError", "'x'", explicit=False),)),
    ),
    "a chain": (
        (
            f"try:\n  try: raise {FULL}\n  except OSError as e: raise ValueError('cache') from e\nexcept ValueError: raise RuntimeError('no"
            " batch')"
        ),
        Raised("RuntimeError", "no batch", (Raised("ValueError", "cache", explicit=False), Raised("OSError", FULL_WORDS))),
    ),
    "a group": (
        f"raise ExceptionGroup('shards', [{FULL}, ValueError('bad\\nlabel')])",
        Raised("ExceptionGroup", "shards (2 sub-exceptions)", (Raised("OSError", FULL_WORDS), Raised("ValueError", "bad\nlabel"))),
    ),
    "one that was handled before": (
        f"import traceback\ntry: raise {FULL}\nexcept OSError: traceback.print_exc()\nraise ValueError('bad label')",
        Raised("ValueError", "bad label"),
    ),
    "one that a finalizer raises after it": (
        "class C:\n  def __del__(self): self.file.close()\nc = C()\nraise ValueError('bad label')",
        Raised("ValueError", "bad label"),
    ),
    "one of the exit": (
        "import atexit\natexit.register(lambda: 1 / 0)\nraise ValueError('bad label')",
        Raised("ValueError", "bad label"),
    ),
    "one of another thread": (
        "import threading\nt = threading.Thread(target=lambda: 1 / 0); t.start(); t.join(); raise SystemExit(1)",
        Raised("ZeroDivisionError", "division by zero"),
    ),
}


@pytest.mark.parametrize("case", PYTHON)
def test_what_python_writes_of_an_exception_is_read(case: str) -> None:
    code, raised = PYTHON[case]
    assert raised_in(written(code)) == raised


TERMINATED = "terminate called after throwing an instance of 'c10::DistBackendError'"


@pytest.mark.parametrize(
    ("lines", "raised"),
    [
        ([TERMINATED, "  what():  Watchdog caught", "more of it", "Aborted"], Raised("DistBackendError", "Watchdog caught\nmore of it")),
        (["terminate called after throwing an instance of 'int'"], Raised("int", "")),
        (["[rank1]: ValueError: boom", TERMINATED, "  what():  a consequence"], Raised("ValueError", "boom")),
        (["[rank1]: Traceback (most recent call last):", '[rank1]:   File "x", line 1', "[rank1]: lib.bad: no"], Raised("bad", "no")),
        (["ValueError: boom", "[rank1]:[W1122 18:00:01.123 Process.cpp:1] Warning: not called"], Raised("ValueError", "boom")),
        (["Segmentation fault", "an Error: in the middle"], None),
        ([], None),
    ],
)
def test_so_is_what_c_plus_plus_and_torch_write(lines: list[str], raised: Raised | None) -> None:
    assert raised_in(lines) == raised


CHAIN = written(f"try: raise {FULL}\nexcept OSError as e: raise RuntimeError('no batch') from e")


def relayed(monkeypatch: pytest.MonkeyPatch, hook_seconds: float) -> list[str]:
    """The last lines of a rank that raised, and whose exit hooks wrote more than is kept, the last line so much later."""
    now = 1000.0
    monkeypatch.setattr(relay_module.time, "monotonic", lambda: now)
    relay = Relay(1, lambda line: None)
    relay.feed("".join(f"{line}\n" for line in CHAIN).encode())
    relay.feed(b"".join(b"uploading %d\n" % number for number in range(60)))
    now += hook_seconds
    relay.feed(b"uploaded\n")
    return relay.last_lines[relay.fresh_from :]


def test_what_exit_hooks_print_does_not_push_the_exception_out_of_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = relayed(monkeypatch, 0.1)
    assert len(lines) == LAST_LINES
    assert (LEFT_OUT in lines, lines[-1]) == (True, "uploaded")
    assert raised_in(lines) == Raised("RuntimeError", "no batch", (Raised("OSError", FULL_WORDS),))


def test_an_exception_after_which_a_rank_went_on_gives_its_place_to_newer_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = relayed(monkeypatch, 5)
    assert raised_in(lines) is None and LEFT_OUT not in lines


def test_twenty_lines_after_its_first_one_belong_to_an_exception_and_twenty_lines_in_c_plus_plus() -> None:
    more = [f"line {number}" for number in range(40)]
    raised = raised_in(["Traceback (most recent call last):", '  File "x", line 1', "ValueError: bad", *more])
    assert raised is not None and raised.message.split("\n") == ["bad", *more[:20]]
    raised = raised_in([TERMINATED, *more])
    assert raised is not None and raised.message.split("\n") == more[:20]


WORKER = (
    "[rank1]: Traceback (most recent call last):\n[rank1]:   File \"worker.py\", line 8, in <module>\n[rank1]: KeyError: 'label_column'\n"
)
PEER = (
    '[rank0]: Traceback (most recent call last):\n[rank0]:   File "worker.py", line 9, in <module>\n[rank0]: RuntimeError: Connection'
    " closed by peer\n"
)
HANDLED = 'Traceback (most recent call last):\n  File "worker.py", line 1, in <module>\nImportError: no flash_attn\n'
LAUNCHER = "E1129 06:47:10.1 api.py:901] failed (exitcode: 1) local_rank: 1\nTraceback (most recent call last):\n" + "".join(
    f'  File "run.py", line {number}, in main\n    main()\n' for number in range(12)
)
CHILD_FAILED = (
    f"{LAUNCHER}torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \nworker.py FAILED\n  exitcode  : 1 (pid: 7)\n"
)
CALLED = f"{LAUNCHER}subprocess.CalledProcessError: Command '['torchrun', 'worker.py']' returned non-zero exit status 1.\n"


@pytest.mark.parametrize("seconds", [0.1, 8.0])
@pytest.mark.parametrize(
    ("written", "names"),
    [
        (WORKER + CALLED, "KeyError"),
        (WORKER + CHILD_FAILED + CALLED, "KeyError"),
        (WORKER + PEER + CHILD_FAILED, "KeyError"),
        (HANDLED + WORKER + PEER + CHILD_FAILED + CALLED, "KeyError"),
        (PEER + CALLED, "RuntimeError"),
    ],
    ids=["subprocess", "torchrun within it", "a peer fails too", "one that was handled", "nothing else"],
)
def test_what_ended_a_child_is_the_cause_of_its_launcher_s_exception(
    written: str, names: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(relay_module.time, "monotonic", lambda: now)
    relay = Relay(1, lambda line: None)
    head, own, tail = written.partition(LAUNCHER)
    relay.feed(head.encode())
    now += seconds
    relay.feed((own + tail).encode())
    lines = relay.last_lines[relay.fresh_from :]
    raised = raised_in(lines)
    assert raised is not None and raised.is_of_a_child and len(lines) <= LAST_LINES
    assert [each.exception for each in raised.led_by if not each.is_of_a_child] == [names]


def test_an_exception_long_before_a_child_s_end_is_not_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(relay_module.time, "monotonic", lambda: now)
    relay = Relay(1, lambda line: None)
    relay.feed(WORKER.encode())
    now += 30
    relay.feed(CALLED.encode())
    raised = raised_in(relay.last_lines[relay.fresh_from :])
    assert raised is not None and (raised.exception, raised.led_by) == ("CalledProcessError", ())
