"""What a rank's end is taken for: by the container's memory, by what it wrote just before, and by how far it had come."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep_gang.agent import relay as relay_module
from lockstep_gang.agent.memory import MemoryGroup
from lockstep_gang.agent.outbox import bounded
from lockstep_gang.agent.relay import Relay
from lockstep_gang.contract import Cause, CheckpointReport, Failure, RestartPolicy
from lockstep_gang.contract.messages import OutOfMemory, RankExit, RankState
from lockstep_gang.lifecycle.gang import Budget
from lockstep_gang.lifecycle.history import AttemptRecord, resumed
from unit.gang_cases import make_run
from unit.gang_story import Story, all_stopped, hello, started

GIB = 2**30
CHILD = ("Traceback (most recent call last):", '  File "worker.py", line 3, in work', "ValueError: a shard is empty")


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(relay_module.time, "monotonic", lambda: self.now)


def written(clock: Clock, *bursts: tuple[float, tuple[str, ...]], ends_after: float = 0.1) -> RankExit:
    """A rank that wrote each of these after so many seconds, and exited with 1."""
    relay = Relay(1, lambda line: None)
    for seconds, lines in bursts:
        clock.now += seconds
        relay.feed("".join(f"{line}\n" for line in lines).encode())
    clock.now += ends_after
    return RankExit(1, 1, None, ordered=False, last_lines=tuple(relay.last_lines), fresh_from=relay.fresh_from)


def failure_of(exit_: RankExit, **changes: Any) -> Failure:
    story = started(restart=RestartPolicy(3, 10), **changes)
    fields = {name: getattr(exit_, name) for name in ("signal", "last_lines", "fresh_from", "out_of_memory")}
    story.exits(exit_.rank, exit_.exit_code, **fields)
    story.exits(0, None, signal="SIGKILL", ordered=True)
    found = all_stopped(story).gang.failure
    assert found is not None
    return found


def test_an_exception_that_ends_a_rank_is_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    found = failure_of(written(Clock(monkeypatch), (0, ("step 4",)), (60, CHILD)))
    assert (found.exception, found.cause) == ("ValueError", Cause.USER_CODE)
    assert found.message == "rank 1 on node 1 exited with 1: ValueError: a shard is empty"


def test_a_message_of_several_lines_and_what_torch_writes_while_it_ends_belong_to_the_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = "[rank1]:[W1122 18:00:01.123 ProcessGroupNCCL.cpp:1496] Warning: destroy_process_group() was not called"
    exit_ = written(
        Clock(monkeypatch),
        (0, (*CHILD[:2], "RuntimeError: CUDA error: an illegal memory access", "Compile with TORCH_USE_CUDA_DSA")),
        (9, (ending,)),
    )
    assert failure_of(exit_).exception == "RuntimeError"


@pytest.mark.parametrize("later", ["it went on", "long before"])
def test_the_traceback_of_a_child_is_not_why_a_rank_exits_later(later: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    exit_ = written(clock, (0, CHILD), (20, ("step 5",))) if later == "it went on" else written(clock, (0, CHILD), ends_after=60)
    found = failure_of(exit_)
    assert (found.exception, found.message) == (None, "rank 1 on node 1 exited with 1")
    assert found.last_lines[:3] == CHILD


def test_words_of_long_before_are_no_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    old = (
        "OSError: [Errno 28] No space left on device: '/tmp/cache'",
        "[gloo] Connection closed by peer",
        "CUDA out of memory, trying again with less",
    )
    assert failure_of(written(clock, (0, old), (20, ("step 9",)))).cause is Cause.USER_CODE
    assert failure_of(written(clock, (0, ("step 9",)), (20, old[:1]))).cause is Cause.STORAGE


@pytest.mark.parametrize(
    "words",
    [
        "Unable to JIT load the deepspeed_shm_comm op due to ninja not being installed.",
        "Unable to JIT load the fused_adam op due to ninja not being installed.",
        "Error building extension 'cpu_adam'",
    ],
)
def test_an_operator_that_cannot_be_compiled_is_told_with_the_two_lines_to_change(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = failure_of(written(Clock(monkeypatch), (0, (*CHILD[:2], f"RuntimeError: {words}"))))
    assert found.cause is Cause.SETUP
    assert f"RuntimeError: {words.removesuffix('.')}; DeepSpeed compiles this operator" in found.message
    assert "`deepspeed.ops.__compatible_ops__ = {}`" in found.message and '`"torch_adam": true`' in found.message
    assert len(found.message) <= 1000


def test_an_extension_of_the_script_s_own_is_no_matter_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = failure_of(written(Clock(monkeypatch), (0, (*CHILD[:2], "RuntimeError: Error building extension 'mine'"))))
    assert (found.cause, found.message) == (
        Cause.USER_CODE,
        "rank 1 on node 1 exited with 1: RuntimeError: Error building extension 'mine'",
    )


def test_a_cut_hello_keeps_which_lines_are_fresh() -> None:
    exit_ = RankExit(1, 1, None, ordered=False, last_lines=tuple(f"{n}" * 500 for n in range(8)), fresh_from=6)
    [state] = bounded([RankState(1, True, exit_)], 4000)
    assert state.exit is not None
    assert 0 < len(state.exit.last_lines) < 8
    assert state.exit.fresh_lines == exit_.fresh_lines


def test_a_rank_that_the_kernel_killed_for_memory_is_told_with_the_limit() -> None:
    found = failure_of(RankExit(1, None, "SIGKILL", ordered=False, out_of_memory=OutOfMemory(8 * GIB, 6 * GIB)))
    assert (found.cause, found.rank) == (Cause.OUT_OF_MEMORY, 1)
    assert found.message == (
        "rank 1 on node 1 was ended by SIGKILL, since the kernel killed a process for want of host memory: its container has reached its limit "
        "of 8.0 GiB, of which this rank had 6.0 GiB at its most"
    )


def test_so_is_one_whose_data_loader_was_killed() -> None:
    lines = ("RuntimeError: DataLoader worker (pid 77) is killed by signal: Killed.",)
    exit_ = RankExit(1, 1, None, ordered=False, last_lines=lines, out_of_memory=OutOfMemory(None, None))
    found = failure_of(exit_)
    assert found.cause is Cause.OUT_OF_MEMORY
    assert "since the kernel killed a process for want of host memory: the machine's memory was used up: RuntimeError" in found.message


VERSIONS = {
    "version 2": ("0::/job", "job/memory.events", "low 0\nhigh 0\nmax 9\noom 1\noom_kill {}\n", "job/memory.max"),
    "version 2 in a container": ("0::/", "memory.events", "oom_kill {}\n", "memory.max"),
    "version 1": (
        "4:cpu,memory:/job\n0::/",
        "memory/job/memory.oom_control",
        "oom_kill_disable 0\noom_kill {}\n",
        "memory/job/memory.limit_in_bytes",
    ),
    "version 1 in a container": ("4:memory:/kubepods/x", "memory/memory.oom_control", "oom_kill {}\n", "memory/memory.limit_in_bytes"),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_cgroup_counts_what_the_kernel_killed(version: str, tmp_path: Path) -> None:
    own, counts, text, limit = VERSIONS[version]
    (tmp_path / counts).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "own").write_text(own)
    (tmp_path / counts).write_text(text.format(2))
    (tmp_path / limit).write_text(f"{4 * GIB}\n")
    group = MemoryGroup(tmp_path, tmp_path / "own")
    assert group.killed(GIB) is None
    (tmp_path / counts).write_text(text.format(3))
    assert group.killed(GIB) == OutOfMemory(4 * GIB, GIB)
    assert group.killed(GIB) is None


def test_a_machine_without_cgroups_tells_nothing(tmp_path: Path) -> None:
    assert MemoryGroup(tmp_path, tmp_path / "own").killed(GIB) is None


@pytest.mark.parametrize("text", ["max\n", "9223372036854771712\n"])
def test_a_group_without_a_limit_has_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("oom_kill 0\n")
    (tmp_path / "memory.max").write_text(text)
    group = MemoryGroup(tmp_path, tmp_path / "own")
    (tmp_path / "memory.events").write_text("oom_kill 1\n")
    assert group.killed(0) == OutOfMemory(None, None)


def test_steps_that_only_the_ranks_of_a_dead_coordinator_knew_count_as_lost() -> None:
    run = make_run(restart=RestartPolicy(3, 10))
    commit = CheckpointReport(40, "/run/checkpoints/step-40.a1", "2026-01-01T00:00:00Z")
    record = AttemptRecord(1, run.job.uid, 0, "2026-01-01T00:00:00Z", budget=Budget(), checkpoint=commit)
    story = Story(run, resumed(run, [record], None, 1000.0))
    assert story.gang.history[0].lost_steps == 0
    story.hears(1, hello(1, attempt=1, ranks=(RankState(1, True, step=48),)))
    assert (story.gang.history[0].lost_steps, story.gang.history[0].failure.step, story.gang.goodput.furthest_step) == (8, 48, 48)
    assert story.gang.failure == replace(story.gang.history[0].failure)
    story.hears(1, hello(1, attempt=1, ranks=(RankState(1, True, step=46),)))
    assert story.gang.history[0].lost_steps == 8
