"""What every place of this machine is asked beside the table of verbs: starts that break at each of their steps, and a log of any size."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.cli.main import main
from support.clusters.bed_hosts import eventually
from support.places.verb_words import HERE, Row, Where, differences

STEPS_MAX = 60
RUNS = "all 2 ranks run"
WRITES = os.O_WRONLY | os.O_RDWR
ENDS = """\
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.1)
"""
"""A script that ends well once there is a file."""
FLOOD = """\
import os, sys
if os.environ["RANK"] == "0":
    for _ in range(int(sys.argv[1])):
        sys.stdout.write(("x" * 7_999 + "\\n") * 125)
    print(*(f"line {number} of the last" for number in range(5)), sep="\\n")
"""
"""A script that writes so many megabytes."""
MEASURED = """\
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print("at most", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, "KiB", file=sys.stderr)
sys.exit(code)
"""
"""Types a command, and says how much memory it and its programs had, each by itself."""
MEMORY_KIB = 150 << 10


def _signal(number: signal.Signals, path: object) -> None:
    signal.raise_signal(number)


def _refuse(number: int, path: object) -> None:
    raise OSError(number, os.strerror(number), path)


@dataclass(frozen=True)
class Break:
    """What happens to the command of a start."""

    happens: Callable[[object], None]
    """Is called with the path that is about to change."""
    codes: tuple[int, ...]
    """Exit codes of a command to which it happens."""
    lasts: bool = False
    """True: it happens to every later change of the place, too."""


BREAKS = {
    "killed": Break(partial(_signal, signal.SIGKILL), (-signal.SIGKILL,)),
    "interrupted": Break(partial(_signal, signal.SIGINT), (130,)),
    "without rights": Break(partial(_refuse, errno.EACCES), (1, 2), lasts=True),
    "away": Break(partial(_refuse, errno.ESTALE), (1, 2), lasts=True),
}


class Command:
    """A command line in a fork of this process, which imports nothing anew, with its output in a file."""

    def __init__(self, words: list[str], folder: Path, hear: Callable[[str, tuple[Any, ...]], None] | None = None) -> None:
        """`hear`: gets the events of the command's, as `sys.addaudithook` has them."""
        self._output = folder / f"output-{len(list(folder.glob('output-*')))}"
        self._output.touch()
        self.pid = os.fork()
        if self.pid:
            return
        code: object = os.EX_SOFTWARE
        try:
            sys.stdout = sys.stderr = self._output.open("w")
            for number in (1, 2):
                os.dup2(sys.stdout.fileno(), number)
            sys.argv, tempfile.tempdir = ["lockstep", *words], str(folder)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if hear is not None:
                sys.addaudithook(hear)
            code = main()
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code if isinstance(code, int) else 0)

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def ends(self) -> int:
        """Wait for its end, and return its exit code; the negative number of the signal that ended it. One that goes on is killed."""
        if not eventually(lambda: self.has_ended):
            os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def broken(words: list[str], how: Break, number: int, root: Path, folder: Path) -> Command:
    """Start a job, to which this happens before its change number `number` of the folder's files, or its start of a process."""
    steps = 0

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal steps
        is_own = str(root if how.lasts else folder) in f"{arguments[:2]}"
        changes = is_own and (event in ("os.mkdir", "os.rename") or (event == "open" and arguments[2] & WRITES))
        if changes or (event == "subprocess.Popen" and not how.lasts):
            steps += 1
            if steps == number or (steps > number and how.lasts):
                how.happens(arguments[0])

    return Command(words, folder, hear)


def breaks_at_each_step(where: Where, folder: Path, how: Break) -> int:
    """Start jobs to which this happens at a step each, and type the same line again. Return the number of steps.

    Raises AssertionError for a command that ended otherwise, or left a job that doesn't get to its end.
    """
    (where.root / "workspace/ends.py").write_text(ENDS)
    return next(number - 1 for number in range(1, STEPS_MAX) if not _breaks_at(number, where, folder, how))


def _breaks_at(number: int, where: Where, folder: Path, how: Break) -> bool:
    """Return False if the start has fewer steps."""
    name, end = f"step-{number}", folder / f"end-{number}"
    where.write(folder, name, "ends.py", str(end))
    words = where.words(f"run -f {{tmp}}/{name}.yaml", folder)
    command = broken(words, how, number, where.root, folder)
    if eventually(lambda: command.has_ended or RUNS in command.output) and not command.has_ended:
        end.touch()
    code = command.ends()
    shown = where.lockstep(f"get {name}", folder).stdout
    assert code in (0, *how.codes) and "Traceback" not in command.output, (number, code, command.output)
    if code == 0:
        return False
    goes_on = shown and not re.search(" (Complete|Suspended) ", shown)
    assert code != 130 or not goes_on or f"lockstep logs {name} " in command.output, (number, shown, command.output)
    end.touch()
    again = Command(words, folder)
    says = rf"lockstep logs {name} |job {name} is complete"
    assert again.ends() == 0 or re.search(says, again.output), (number, command.output, again.output)
    done = where.lockstep(f"wait {name} --for Complete --timeout 60", folder)
    assert done.returncode == 0, (number, command.output, again.output, done)
    return True


def ctrl_c_leaves_what_the_next_goes_on_from(where: Where, folder: Path) -> None:
    """Interrupt a command that follows its job, and type the same line again."""
    (where.root / "workspace/ends.py").write_text(ENDS)
    where.write(folder, "followed", "ends.py", str(folder / "end"))
    words = where.words("run -f {tmp}/followed.yaml", folder)
    first = Command(words, folder)
    assert eventually(lambda: RUNS in first.output), first.output
    os.kill(first.pid, signal.SIGINT)
    assert first.ends() == 130
    assert ("the ranks save first" if where.kind == HERE else "lockstep logs followed ") in first.output, first.output
    (folder / "end").touch()
    second = Command(words, folder)
    assert second.ends() == (0 if where.kind == HERE else 2), second.output
    done = where.lockstep("wait followed --for Complete --timeout 60", folder)
    assert done.returncode == 0, (second.output, done)


FLOODED = [
    Row("logs flood --tail 5", 0, "KiB\n", r"(\[rank 0\] line [1-4] of the last\n){4}\[lockstep\] Complete: all ranks are done\n$"),
    Row("logs flood -f", 0, "KiB\n", r"(?s:.*)\[lockstep\] Complete: all ranks are done\n$"),
    Row("why flood", 0, "KiB\n", r"flood: Complete: "),
    Row("get flood", 0, "KiB\n", r"NAME.*\nflood .* Complete "),
]
"""Rows of a job whose log is large."""


def answers_about_a_log_of(megabytes: int, where: Where, folder: Path) -> None:
    """Let a job write so much, and type rows about it: no verb about it takes the memory that its log would."""
    (where.root / "workspace/flood.py").write_text(FLOOD)
    where.write(folder, "flood", "flood.py", str(megabytes))
    with where.begin("run -f {tmp}/flood.yaml", folder, stdout=subprocess.DEVNULL) as process:
        assert process.wait(600) == 0, process.communicate()
    measured = replace(where, program=("-c", MEASURED, sys.executable, *where.program))
    told = [measured.alone(row.typed, folder) for row in FLOODED]
    wrong = [*differences(measured, FLOODED, folder, lambda typed, _: told[[row.typed for row in FLOODED].index(typed)])]
    assert not wrong, "\n".join(wrong)[:5000]
    sizes = {row.typed: int(one.stderr.split()[-2]) for row, one in zip(FLOODED, told, strict=True)}
    assert max(sizes.values()) < MEMORY_KIB, sizes
