"""`lockstep stacks`: real ranks are asked where they are, and go on."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.plan.pages.stacks import NOT_THERE, RankAnswer, Thread, read_ranks, stacks_page, threads_of, with_silent
from lockstep.platforms.inpod import rankstacks
from lockstep_gang.agent.ranks.processes import kill_strays
from lockstep_gang.contract.layout import RankLayout
from lockstep_gang.contract.run import Run
from lockstep_machine.processes import ProcessState, process_state
from unit.cli.test_every_verb import run as run_verb
from unit.gang.cases import Gang, gang

PYTHON = (sys.executable, "rank.py")
"""With site, unlike the other tests' ranks: that is what starts it."""
SCRIPT = """
import os, signal, sys, threading, time
R, ready = int(os.environ["RANK"]), threading.Event()
def here():
    print("here", os.getpid(), flush=True)
def wait_for_all():
    here()
    time.sleep(1000)
def odd_one_out():
    here()
    {odd}
def beside():
    ready.set()
    time.sleep(1000)
threading.Thread(target=beside, daemon=True).start()
ready.wait()
odd_one_out() if R == {who} else wait_for_all()
"""


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Gang]:
    with gang(tmp_path) as made:
        yield made
    kill_strays(f"TMPDIR={made.private.name}")  # the child of a rank that is a shell script outlives the agent's SIGKILL


def write(agents: Gang, odd: str = "time.sleep(1000)", who: int = 1, **changes: Any) -> Run:
    return agents.write(SCRIPT.format(odd=odd, who=who), **{"command": PYTHON, "nodes": 1, "ranks_per_node": 2} | changes)


def started(agents: Gang, ranks: int = 2) -> list[int]:
    """Their processes, once all are in their script."""
    agents.start(0)
    agents.wait(lambda: "yes" if agents.log().count("] here") == ranks else None, 20, "ranks")
    pids = {int(line.split()[1].rstrip("]")): int(line.split()[-1]) for line in agents.log().splitlines() if "] here" in line}
    return [pids[rank] for rank in range(ranks)]


def asked(run: Run, rank: int | None = None) -> list[RankAnswer]:
    answer = rankstacks.look(rank, run.run_dir)
    assert answer["worldSize"] == run.world_size
    return read_ranks(answer)


def inside(answer: RankAnswer) -> str:
    return " ".join(answer.threads[0].frames)


def test_all_ranks_are_asked_again_and_again_and_neither_they_nor_their_log_notice(agents: Gang) -> None:
    run = write(agents)
    pids = started(agents)
    for _ in range(3):
        first, second = asked(run)
        assert (first.problem, second.problem) == ("", "")
        assert "in wait_for_all" in inside(first) and "in odd_one_out" in inside(second)
        assert any("in beside" in frame for thread in first.threads[1:] for frame in thread.frames)
    assert [len(one.threads) for one in asked(run, 1)] == [2]
    for pid in pids:
        os.kill(pid, 0)
    assert not [line for line in agents.log().splitlines() if "most recent call first" in line or 'File "' in line]
    text = "\n".join(stacks_page(asked(run)))
    assert re.search(r"^rank 0: main thread", text, re.MULTILINE) and re.search(r"^ranks 0-1: another thread", text, re.MULTILINE)


def test_native_code_that_holds_the_interpreter_is_no_obstacle(agents: Gang) -> None:
    locked = "import ctypes; lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64); lock(mutex); lock(mutex)"
    run = write(agents, locked)
    rank = Path("/proc", str(started(agents)[1]))  # (it says that it is there before the call)
    agents.wait(lambda: "yes" if process_state(rank).letter == "S" else None, 20, "lock")
    assert "in odd_one_out" in inside(asked(run)[1])


def test_a_rank_that_computes_goes_on_where_it_was(agents: Gang) -> None:
    computing = 'n = 0\n    while True:\n        n += 1\n        open(os.environ["FOLDER"] + "/n", "w").write(str(n))'
    run = write(agents, computing)
    started(agents)
    for _ in range(20):
        assert "in odd_one_out" in inside(asked(run, 1)[0])
    seen = (agents.folder / "n").stat().st_mtime_ns
    agents.wait(lambda: "on" if (agents.folder / "n").stat().st_mtime_ns > seen else None, 5, "progress")


def test_a_rank_that_is_frozen_before_it_could_answer_is_named_so_too() -> None:
    assert rankstacks._why_silent(ProcessState("T", "do_signal_stop")).startswith("its process is stopped (state T)")


def test_a_frozen_rank_is_named_and_left_as_it_is(agents: Gang) -> None:
    run = write(agents)
    pids = started(agents)
    os.kill(pids[1], signal.SIGSTOP)
    answers = asked(run)
    assert answers[0].problem == "" and answers[1].problem.startswith("its process is stopped (state T)")
    assert process_state(Path("/proc", str(pids[1]))).letter == "T"
    os.kill(pids[1], signal.SIGCONT)
    assert asked(run)[1].problem == ""


def test_a_rank_whose_python_is_a_child_of_a_shell_script_is_found(agents: Gang) -> None:
    (agents.folder / "start.sh").write_text(f"{sys.executable} rank.py\nexit $?\n")
    run = write(agents, command=("/bin/sh", "start.sh"))
    started(agents)
    assert "in odd_one_out" in inside(asked(run)[1])


@pytest.mark.parametrize("command", [(sys.executable, "-I", "rank.py"), ("/bin/sh", "rank.sh")])
def test_a_program_that_can_t_be_asked_is_said_and_not_killed(agents: Gang, command: tuple[str, ...]) -> None:
    (agents.folder / "rank.sh").write_text("echo here $$\nsleep 1000\nexit\n")
    run = write(agents, command=command)
    pids = started(agents)
    assert {answer.problem[:34] for answer in asked(run)} == {"it runs no Python that can be aske"}
    for pid in pids:
        os.kill(pid, 0)


def test_a_rank_that_takes_the_signal_for_itself_is_left_alone(agents: Gang) -> None:
    run = write(agents, "signal.signal(signal.SIGRTMAX - 5, signal.SIG_DFL); print('reset', flush=True); time.sleep(1000)")
    started(agents)
    agents.until("reset")
    assert asked(run)[1].problem.startswith("it runs no Python that can be asked")


def test_a_rank_that_blocks_the_signal_has_not_answered(agents: Gang) -> None:
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMAX - 5})"
    run = agents.write(
        f"import os, signal, time\n{block}\nprint('here', os.getpid(), flush=True)\ntime.sleep(1000)", command=PYTHON, nodes=1
    )
    started(agents, 1)
    assert asked(run)[0].problem.startswith("it has not answered within 3 s (state S")


def test_another_sitecustomize_is_run_as_well_and_the_path_is_as_it_was(agents: Gang) -> None:
    other = agents.folder / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import sys\nsys.was_here = __file__\n")
    look = "import os, sys, sitecustomize\nprint('path', sys.was_here, sitecustomize.__file__, *sys.path[1:3], flush=True)\n"
    environment = {"FOLDER": str(agents.folder), "PYTHONPATH": str(other)}
    agents.write(
        f"{look}print('here', os.getpid(), flush=True)\nimport time; time.sleep(1000)", command=PYTHON, nodes=1, environment=environment
    )
    started(agents, 1)
    own = str(other / "sitecustomize.py")
    assert agents.until("] path").split()[3:6] == [own, own, str(other)]
    assert len([word for word in agents.until("] path").split() if "/python" in word and "lockstep-" in word]) == 0


def test_only_the_newest_attempt_and_only_this_run_are_asked(agents: Gang) -> None:
    run = write(agents)
    started(agents)
    assert rankstacks.look(None, f"{run.run_dir}-other") == {"ranks": [], "worldSize": 0, "ranksPerNode": 0}
    found = rankstacks.rank_processes_of(run.run_dir)
    older = [{**one, "attempt": one["attempt"] - 1, "pid": 1} for one in found]
    assert {one["pid"] for one in rankstacks.chosen([*older, *found], None)} == {one["pid"] for one in found}


def test_it_is_shown_for_a_run_of_this_machine(agents: Gang, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    workspace = agents.folder / "place"
    run = write(agents, run_dir=str(workspace / "workspace/runs/x"))
    monkeypatch.chdir(agents.folder)
    words = ["stacks", "x", "--cluster", str(workspace)]
    assert run_verb(monkeypatch, words) == 2
    pids = started(agents)
    assert run_verb(monkeypatch, words) == 0
    assert "rank 0: main thread (most recent call first)" in capsys.readouterr().out
    os.kill(pids[1], signal.SIGSTOP)
    assert run_verb(monkeypatch, words) == 1
    assert "rank 1: no answer: its process is stopped" in capsys.readouterr().out
    assert run_verb(monkeypatch, [*words, "--rank", "0"]) == 0
    assert "rank 1" not in capsys.readouterr().out
    assert run_verb(monkeypatch, [*words, "--rank", "7"]) == 2
    assert "there is no rank 7: the job has 2 ranks, 0 to 1" in capsys.readouterr().err
    assert run.nodes == 1


TEXT = """
Thread 0x00007f31 [pin memory] (most recent call first):
  File "/a.py", line 2 in beside

Current thread 0x00007f30 (most recent call first):
  File "/a.py", line 9 in step
  File "/a.py", line 12 in <module>
"""


def test_the_main_thread_is_the_last_that_faulthandler_writes() -> None:
    main, other = threads_of(textwrap.dedent(TEXT).splitlines())
    assert main == Thread(True, ('File "/a.py", line 9 in step', 'File "/a.py", line 12 in <module>'))
    assert other == Thread(False, ('File "/a.py", line 2 in beside',))


def test_what_ranks_have_in_common_is_told_once_and_who_did_not_answer_last() -> None:
    here, there = (Thread(True, (f'File "/a.py", line {line} in step',)) for line in (9, 10))
    answers = [RankAnswer(rank, 0, 1, "S", (there if rank == 3 else here,)) for rank in range(6)]
    answers = with_silent(answers, None, {4: "node 4 doesn't answer: it is gone"}, RankLayout((2, 2, 2, 2, 1)))
    assert list(stacks_page(answers)) == [
        "ranks 0-2, 4-5: main thread (most recent call first)", '  File "/a.py", line 9 in step', "",
        "rank 3: main thread (most recent call first)", '  File "/a.py", line 10 in step', "",
        "ranks 6-7: no answer: no process of it runs: it has ended, or not begun",
        "rank 8: no answer: node 4 doesn't answer: it is gone",
    ]  # fmt: skip


def test_a_rank_that_did_not_answer_is_looked_for_in_the_order_of_ranks() -> None:
    layout = RankLayout((2, 1, 1), order=(0, 2, 1))
    assert [(one.rank, one.node, one.problem) for one in with_silent([], 2, {2: "gone"}, layout)] == [(2, 2, "gone")]
    assert [(one.rank, one.problem) for one in with_silent([], 9, {2: "gone"}, layout)] == [(9, NOT_THERE)]


def test_what_is_no_answer_is_left_out() -> None:
    assert read_ranks({"ranks": [1, {"rank": -1}, {"rank": 0, "node": 0, "attempt": "x"}, None]}) == []
    assert read_ranks({"ranks": {}}) == []
    (one,) = read_ranks({"ranks": [{"rank": 0, "node": 0, "attempt": 1, "state": "S", "lines": [1, "x"], "problem": ""}]})
    assert one.problem == "it answered with no stack"
