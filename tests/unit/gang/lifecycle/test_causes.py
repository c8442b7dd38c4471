"""What a rank's end is taken for: by the container's memory, by what it wrote just before, and by how far it had come."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep_gang.agent.outbox import bounded
from lockstep_gang.agent.ranks import memory
from lockstep_gang.agent.ranks import relay as relay_module
from lockstep_gang.agent.ranks.memory import MemoryGroup
from lockstep_gang.agent.ranks.relay import Relay
from lockstep_gang.contract.messages import OutOfMemory, RankExit, RankState
from lockstep_gang.contract.report import Cause, CheckpointReport, Failure
from lockstep_gang.contract.run import RestartPolicy
from lockstep_gang.lifecycle.causes import rank_cause
from lockstep_gang.lifecycle.gang import Budget
from lockstep_gang.lifecycle.history import AttemptRecord, resume_gang
from lockstep_gang.lifecycle.tracebacks import Raised
from unit.gang.cases import make_run
from unit.gang.story import Story, all_stopped, hello, started

GIB = 2**30
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled error, NCCL version 2.29.3\n"
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
    fields = {
        name: getattr(exit_, name)
        for name in ("signal", "last_lines", "fresh_from", "out_of_memory", "process_limit", "no_room", "elsewhere")
    }
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
    assert 0 < len(state.exit.last_lines) < 8
    assert state.exit.fresh_lines == exit_.fresh_lines


def test_a_rank_that_the_kernel_killed_for_memory_is_told_with_the_limit() -> None:
    found = failure_of(RankExit(1, None, "SIGKILL", ordered=False, out_of_memory=OutOfMemory(8 * GIB, 6 * GIB)))
    assert (found.cause, found.rank) == (Cause.OUT_OF_MEMORY, 1)
    assert (
        found.message
        == "rank 1 on node 1 was ended by SIGKILL: the kernel killed a process because host memory ran out: its container reached its"
        " limit "
        "of 8 GiB, of which this rank used 6 GiB at its peak"
    )


def test_so_is_one_whose_data_loader_was_killed() -> None:
    lines = ("RuntimeError: DataLoader worker (pid 77) is killed by signal: Killed.",)
    exit_ = RankExit(1, 1, None, ordered=False, last_lines=lines, out_of_memory=OutOfMemory(None, None))
    found = failure_of(exit_)
    assert found.cause is Cause.OUT_OF_MEMORY
    assert "the kernel killed a process because host memory ran out: the machine's memory was used up: RuntimeError" in found.message


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


@pytest.mark.parametrize(
    ("own", "files", "user", "words"),
    [
        ("0::/pod/x", {"pod/x/pids.max": "max", "pod/pids.max": "512"}, 4096, "pids.max of its cgroup is 512"),
        ("0::/", {"pids.max": "900"}, -1, "pids.max of its cgroup is 900"),
        ("8:pids:/x", {"pids/x/pids.max": "700"}, 600, "ulimit -u of its user is 600"),
        ("0::/", {"pids.max": "max"}, -1, ""),
    ],
)
def test_the_nearest_limit_of_processes_is_named(
    own: str, files: dict[str, str], user: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(f"{text}\n")
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(memory.resource, "getrlimit", lambda kind: (user, user))
    monkeypatch.setattr(memory.os, "geteuid", lambda: 1000)
    assert memory.process_limit(tmp_path / "groups", tmp_path / "own") == words


FORK = ("    self.pid = os.fork()", "BlockingIOError: [Errno 11] Resource temporarily unavailable")
MORE = "start fewer workers and threads, or raise the pod's limit (podPidsLimit in the configuration of the node's kubelet)"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (("RuntimeError: can't start new thread",), True),
        (("OpenBLAS blas_thread_init: pthread_create failed for thread 5 of 8: Resource temporarily unavailable",), True),
        (("bash: fork: retry: Resource temporarily unavailable",), True),
        (FORK, True),
        (("BlockingIOError: Resource temporarily unavailable: python",), True),
        (("    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)", FORK[1]), False),
    ],
)
def test_a_process_that_can_not_be_made_is_told_with_its_limit(lines: tuple[str, ...], says: bool) -> None:
    found = failure_of(RankExit(1, 1, None, ordered=False, last_lines=lines, process_limit="pids.max of its cgroup is 512"))
    assert found.cause is Cause.SETUP
    expected = f"; no more processes or threads could be made there: pids.max of its cgroup is 512: {MORE}"
    assert found.message.endswith(expected) is says


FULL_SHM = "the file system /dev/shm has 0 B of 64 MiB left: raise the cluster's shm_size, or use fewer workers"
FULL_TMP = "the file system /tmp has no inodes left, of 4096: remove files there, however small"
NOT_SAID = "OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("end", "room", "cause", "message"),
    [
        ({"last_lines": (NOT_SAID,)}, FULL_SHM, Cause.OUT_OF_MEMORY, f"rank 1 on node 1 exited with 1: {NOT_SAID}; {FULL_SHM}"),
        ({"last_lines": (NOT_SAID,)}, FULL_TMP, Cause.STORAGE, f"rank 1 on node 1 exited with 1: {NOT_SAID}; {FULL_TMP}"),
        (
            {"last_lines": ("cp: error writing 'x': Disk quota exceeded",)},
            "a quota",
            Cause.STORAGE,
            "rank 1 on node 1 exited with 1; a quota",
        ),
        ({"exit_code": None, "signal": "SIGBUS"}, FULL_SHM, Cause.OUT_OF_MEMORY, f"rank 1 on node 1 was ended by SIGBUS; {FULL_SHM}"),
        (
            {"last_lines": (NOT_SAID, "ValueError: bad label")},
            FULL_TMP,
            Cause.USER_CODE,
            "rank 1 on node 1 exited with 1: ValueError: bad label",
        ),
    ],
)
def test_the_file_system_that_had_no_room_is_named_with_what_helps(end: dict[str, Any], room: str, cause: Cause, message: str) -> None:
    found = failure_of(RankExit(**{"rank": 1, "exit_code": 1, "signal": None, "ordered": False, "no_room": room, **end}))
    assert (found.cause, found.message) == (cause, message)


@pytest.mark.parametrize(
    ("line", "cause", "end"),
    [
        ("FileNotFoundError: [Errno 2] No such file or directory: 'conf.py'", Cause.CONFIGURATION, "; conf.py is in /w/repo"),
        ("ModuleNotFoundError: No module named 'conf'", Cause.CONFIGURATION, "; conf.py is in /w/repo"),
        ("KeyError: 'label'", Cause.USER_CODE, "KeyError: 'label'"),  # the other one was caught
    ],
)
def test_the_fields_that_lead_to_a_missing_file_end_the_message(line: str, cause: Cause, end: str) -> None:
    exit_ = RankExit(1, 1, None, ordered=False, last_lines=("Traceback (most recent call last):", line), elsewhere="conf.py is in /w/repo")
    found = failure_of(exit_)
    assert found.cause is cause and found.message.endswith(end)


@pytest.mark.parametrize(
    ("code", "last", "end"),
    [
        (2, "train.py: error: unrecognized arguments: --no-such=1", "exited with 2: train.py: error: unrecognized arguments: --no-such=1"),
        (2, "Error: No such option: --no-such", "exited with 2: Error: No such option: --no-such"),
        (2, "usage: train.py [-h]", "exited with 2"),
        (1, "train.py: error: unrecognized arguments: --no-such=1", "exited with 1"),
    ],
)
def test_arguments_that_a_script_doesnt_take_are_named(code: int, last: str, end: str) -> None:
    lines = ("usage: train.py [-h] [--epochs N]", last)
    assert failure_of(RankExit(1, code, None, ordered=False, last_lines=lines)).message == f"rank 1 on node 1 {end}"


def test_steps_that_only_the_ranks_of_a_dead_coordinator_knew_count_as_lost() -> None:
    run = make_run(restart=RestartPolicy(3, 10))
    commit = CheckpointReport(40, "/run/checkpoints/step-40.a1", "2026-01-01T00:00:00Z")
    record = AttemptRecord(1, run.job.uid, 0, "2026-01-01T00:00:00Z", budget=Budget(), checkpoint=commit)
    story = Story(run, resume_gang(run, [record], None, 1000.0))
    assert story.gang.history[0].lost_steps == 0
    story.hears(1, hello(1, attempt=1, ranks=(RankState(1, True, step=48),)))
    assert (story.gang.history[0].lost_steps, story.gang.history[0].failure.step, story.gang.goodput.furthest_step) == (8, 48, 48)
    assert story.gang.failure == replace(story.gang.history[0].failure)
    story.hears(1, hello(1, attempt=1, ranks=(RankState(1, True, step=46),)))
    assert story.gang.history[0].lost_steps == 8


RAISED = [
    # The system's error number, and what it is said of.
    ("OSError", "[Errno 28] No space left on device: '/workspace/x'", Cause.STORAGE),
    ("OSError", "[Errno 117] Structure needs cleaning: '/workspace/x'", Cause.STORAGE),
    ("OSError", "[Errno 37] No locks available", Cause.STORAGE),
    ("BrokenPipeError", "[Errno 108] Cannot send after transport endpoint shutdown: '/lustre/x'", Cause.STORAGE),
    ("TimeoutError", "[Errno 110] Connection timed out: '/datasets/shard-3.arrow'", Cause.STORAGE),
    ("TimeoutError", "[Errno 110] Connection timed out", Cause.FABRIC),
    ("OSError", "[Errno 70] Communication error on send: '/mnt/beegfs/x'", Cause.STORAGE),
    ("OSError", "[Errno 36] File name too long: '/workspace/x'", Cause.USER_CODE),
    ("BlockingIOError", "[Errno 11] Unable to open file (unable to lock file, errno = 11)", Cause.STORAGE),
    ("SafetensorError", "Error while serializing: I/O error: No space left on device (os error 28)", Cause.STORAGE),
    ("PermissionError", "[Errno 13] Permission denied: '/workspace/runs/x'", Cause.STORAGE),
    ("PermissionError", "[Errno 13] Permission denied: '/.triton'", Cause.SETUP),
    ("OSError", "[Errno 12] Cannot allocate memory", Cause.OUT_OF_MEMORY),
    ("OSError", "[Errno 28] No space left on device: '/dev/shm/psm_4711'", Cause.OUT_OF_MEMORY),
    ("RuntimeError", "unable to write to file </torch_4711_22_0>: No space left on device (28)", Cause.OUT_OF_MEMORY),
    ("OSError", "[Errno 101] Network is unreachable", Cause.FABRIC),
    # NCCL's errors have one class for everything.
    ("DistBackendError", f"{NCCL}ncclRemoteError: A call failed possibly due to a network error", Cause.FABRIC),
    ("DistBackendError", f"{NCCL}ncclInvalidUsage: This usually reflects invalid usage of NCCL library.", Cause.USER_CODE),
    ("DistBackendError", f"{NCCL}Last error:\nCuda failure 2 'out of memory'", Cause.OUT_OF_MEMORY),
    ("DistBackendError", f"{NCCL}Last error:\nCuda failure 214 'uncorrectable ECC error encountered'", Cause.HARDWARE),
    ("DistBackendError", f"{NCCL}Error while creating shared memory segment /dev/shm/nccl-a (size 9637888)", Cause.OUT_OF_MEMORY),
    ("DistBackendError", f"{NCCL}Call to ibv_create_qp failed with error Cannot allocate memory errno 12", Cause.SETUP),
    ("DistBackendError", "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)", Cause.HANG),
    ("RuntimeError", "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete", Cause.HANG),
    ("ValueError", "model type `m` is not recognized. Your version of Transformers is out of date.", Cause.SETUP),
    ("ValueError", "this needs peft 1: run `pip install --upgrade peft`", Cause.SETUP),
    # Services outside the job are not its peers.
    ("ConnectionError", "HTTPConnectionPool(host='mlflow', port=5000): Max retries exceeded: Connection refused", Cause.SETUP),
    ("ConnectError", "[Errno 111] Connection refused", Cause.SETUP),
    (
        "TrainerError",
        "https://huggingface.co can't be asked for the model org/m: it answers 503; check that the job can reach it (proxy, HF_ENDPOINT)",
        Cause.SETUP,
    ),
    (
        "TrainerError",
        "org/m needs 9.0 GB more in /workspace/cache/models/org--m, and 1.0 GB are free there; free 8.0 GB or use a larger claim",
        Cause.STORAGE,
    ),
    ("HTTPError", "503 Server Error: Service Unavailable for url: http://mlflow:5000/api", Cause.SETUP),
    ("ConnectionError", "Error 111 connecting to redis:6379. Connection refused.", Cause.SETUP),
    ("URLError", "<urlopen error [Errno 111] Connection refused>", Cause.SETUP),
    ("ConnectionRefusedError", "[Errno 111] Connection refused", Cause.FABRIC),
    ("OSError", "We couldn't connect to 'https://huggingface.co' to load the files", Cause.SETUP),
    # What is one thing by its class, whatever words it quotes.
    ("KeyError", "'CUDA out of memory'", Cause.USER_CODE),
    ("KeyError", "'nan'", Cause.USER_CODE),
    ("FileNotFoundError", "[Errno 2] No such file or directory: '/datasets/connection closed by peer.jsonl'", Cause.USER_CODE),
    ("_ArrayMemoryError", "Unable to allocate 2.00 EiB for an array", Cause.OUT_OF_MEMORY),
    ("bad_alloc", "std::bad_alloc", Cause.OUT_OF_MEMORY),
    ("PackageNotFoundError", "No package metadata was found for bitsandbytes", Cause.SETUP),
    ("ImportError", "cannot import name 'x' from 'transformers' (/opt/lib/python3.12/site-packages/transformers/__init__.py)", Cause.SETUP),
    ("ImportError", "cannot import name 'collate' from 'batches' (/workspace/batches.py)", Cause.USER_CODE),
    # Devices.
    ("AcceleratorError", "CUDA error: device-side assert triggered", Cause.USER_CODE),
    ("AcceleratorError", "CUDA error: all CUDA-capable devices are busy or unavailable", Cause.SETUP),
    ("AcceleratorError", "CUDA error: out of memory", Cause.OUT_OF_MEMORY),
    ("OutOfResources", "out of resource: shared memory, Required: 131072, Hardware limit: 101376", Cause.USER_CODE),
    # What is no number.
    ("RuntimeError", "Function 'MulBackward0' returned nan values in its 0th output.", Cause.NON_FINITE),
    ("RuntimeError", "The total norm of order 2.0 for gradients from `parameters` is non-finite", Cause.NON_FINITE),
    ("ValueError", "cannot convert float NaN to integer", Cause.NON_FINITE),
    ("RuntimeError", "NaN detected in loss at iteration 512", Cause.NON_FINITE),
    ("ValueError", "not enough information about inf_loop in config", Cause.USER_CODE),
    # A child's end.
    ("CalledProcessError", "Command 'x' died with <Signals.SIGKILL: 9>.", Cause.KILLED),
    ("CalledProcessError", "Command 'x' returned non-zero exit status 127.", Cause.SETUP),
    ("CalledProcessError", "Command 'x' returned non-zero exit status 4.", Cause.USER_CODE),
    ("ProcessExitedException", "process 0 terminated with signal SIGKILL", Cause.KILLED),
]


@pytest.mark.parametrize(("exception", "message", "cause"), RAISED)
def test_an_exception_is_judged_by_what_it_is_before_its_words(exception: str, message: str, cause: Cause) -> None:
    assert rank_cause(False, 1, None, Raised(exception, message), "") is cause


@pytest.mark.parametrize(
    ("exception", "message", "frame", "cause"),
    [
        ("BrokenPipeError", "[Errno 32] Broken pipe", 'File "train.py", line 7\n    child.stdin.write(line)', Cause.USER_CODE),
        ("BrokenPipeError", "[Errno 32] Broken pipe", 'File "train.py", line 7\n    print(loss)', Cause.USER_CODE),
        ("BrokenPipeError", "[Errno 32] Broken pipe", 'File "/usr/lib/python3.11/multiprocessing/connection.py", line 205, in send_bytes',
            Cause.USER_CODE),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer",
            'File "/usr/lib/python3.11/multiprocessing/connection.py", line 395, in _recv', Cause.USER_CODE),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer", 'File "/usr/lib/python3.11/socket.py", line 706, in readinto',
            Cause.FABRIC),
        ("BrokenPipeError", "[Errno 32] Broken pipe", 'File "peers.py", line 7\n    peer.sendall(part)', Cause.FABRIC),
    ],
)  # fmt: skip
def test_a_pipe_to_a_process_of_the_ranks_own_is_no_fabric(exception: str, message: str, frame: str, cause: Cause) -> None:
    text = f"Traceback (most recent call last):\n  {frame}\n{exception}: {message}"
    assert rank_cause(False, 1, None, Raised(exception, message), text) is cause


NO_ROOM = Raised("OSError", "[Errno 28] No space left on device: '/w/x'")


@pytest.mark.parametrize(
    ("raised", "cause"),
    [
        (Raised("RuntimeError", "no batch", (NO_ROOM,)), Cause.STORAGE),
        (Raised("ExceptionGroup", "shards", (NO_ROOM, NO_ROOM)), Cause.STORAGE),
        (Raised("RuntimeError", "no batch", (replace(NO_ROOM, explicit=False),)), Cause.STORAGE),
        (Raised("KeyError", "'x'", (replace(NO_ROOM, explicit=False),)), Cause.USER_CODE),
        (Raised("ModuleNotFoundError", "No module named 'x'", (NO_ROOM,)), Cause.SETUP),
    ],
)
def test_what_says_nothing_itself_is_judged_by_what_led_to_it(raised: Raised, cause: Cause) -> None:
    assert rank_cause(False, 1, None, raised, "") is cause


@pytest.mark.parametrize(
    ("exit_code", "signal", "cause"),
    [
        (137, None, Cause.KILLED),
        (247, None, Cause.KILLED),
        (143, None, Cause.KILLED),
        (130, None, Cause.KILLED),
        (139, None, Cause.USER_CODE),
        (135, None, Cause.OUT_OF_MEMORY),
        (127, None, Cause.SETUP),
        (126, None, Cause.SETUP),
        (213, None, Cause.USER_CODE),
        (255, None, Cause.USER_CODE),
        (None, "SIGXCPU", Cause.SETUP),
        (None, "SIGXFSZ", Cause.STORAGE),
        (None, "SIGSYS", Cause.SETUP),
        (None, "SIGILL", Cause.SETUP),
        (132, None, Cause.SETUP),
    ],
)
def test_a_script_that_says_nothing_is_judged_by_how_it_ended(exit_code: int | None, signal: str | None, cause: Cause) -> None:
    assert rank_cause(False, exit_code, signal, None, "") is cause
    if exit_code is not None:
        assert rank_cause(True, exit_code, signal, None, "") is Cause.INTERNAL


@pytest.mark.parametrize(
    ("host", "is_another"),
    [
        ("old-head-node", True),
        ("old-head-node.example.com", True),
        ("localhost", True),
        ("127.0.0.1", True),
        ("mine-0.mine", False),
        ("mine-0", False),
        ("10.9.8.7", False),
        ("fd00::9", False),
    ],
)
def test_a_script_that_sets_another_master_is_told_so(host: str, is_another: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    error = f"torch.distributed.DistNetworkError: The client socket has timed out after 3000ms while trying to connect to ({host}, 29500)."
    found = failure_of(written(Clock(monkeypatch), (0, (*CHILD[:2], error))), addresses=("mine-0.mine", "mine-1.mine"))
    assert (found.cause is Cause.SETUP, "not the MASTER_ADDR of this job" in found.message) == (is_another, is_another)


IMPORT = ('  File "/train.py", line 3, in <module>', '  File "/usr/lib/python3/site-packages/a_pb2.py", line 9, in <module>')
CALL = ('  File "/train.py", line 3, in <module>', '  File "/usr/lib/python3/site-packages/a.py", line 9, in read')


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ((CHILD[0], *IMPORT, "TypeError: Descriptors cannot be created directly."), Cause.SETUP),
        ((CHILD[0], *IMPORT, "RuntimeError: operator torchvision::nms does not exist"), Cause.SETUP),
        ((CHILD[0], *CALL, "TypeError: unhashable type: 'list'"), Cause.USER_CODE),
        ((CHILD[0], *IMPORT, "ImportError: no fast path", CHILD[0], *CALL, "KeyError: 'tokens'"), Cause.USER_CODE),
        ((CHILD[0], '  File "<frozen os>", line 607, in _execvpe', "FileNotFoundError: [Errno 2] No such file or directory"), Cause.SETUP),
        ((*CHILD[:2], "OSError: ./fused.so: invalid ELF header"), Cause.SETUP),
        ((*CHILD[:2], "OSError: [Errno 28] inotify watch limit reached"), Cause.SETUP),
    ],
)
def test_what_the_image_or_the_machine_lacks_is_no_fault_of_the_script(
    lines: tuple[str, ...], cause: Cause, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failure_of(written(Clock(monkeypatch), (0, lines))).cause is cause


def test_a_child_s_signal_is_named_with_the_exit_code_that_stands_for_it() -> None:
    found = failure_of(RankExit(1, 137, None, ordered=False))
    assert found.message.startswith(
        "rank 1 on node 1 exited with 137, as a script does after its program was ended by SIGKILL (by the kernel"
    )


def test_what_led_to_an_exception_is_told_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    link = "The above exception was the direct cause of the following exception:"
    lines = (*CHILD[:2], NO_ROOM.words, link, *CHILD[:2], "RuntimeError: no batch")
    found = failure_of(written(Clock(monkeypatch), (0, lines)))
    assert (found.exception, found.cause) == ("RuntimeError", Cause.STORAGE)
    assert found.message == f"rank 1 on node 1 exited with 1: RuntimeError: no batch; from {NO_ROOM.words}"


def test_an_exception_that_was_handled_and_written_is_no_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    handled = (*CHILD[:2], "OutOfMemoryError: CUDA out of memory, taking a smaller batch")
    assert failure_of(written(Clock(monkeypatch), (0, (*handled, *CHILD)))).cause is Cause.USER_CODE


def test_whom_somebody_kills_has_not_ended_by_what_it_wrote_before(monkeypatch: pytest.MonkeyPatch) -> None:
    exit_ = replace(written(Clock(monkeypatch), (0, CHILD)), exit_code=None, signal="SIGKILL")
    found = failure_of(exit_)
    assert (found.cause, found.exception) == (Cause.KILLED, None)


def test_a_trainer_that_saves_and_stops_without_an_order_was_told_to_by_somebody_else() -> None:
    found = failure_of(RankExit(1, 75, None, ordered=False), training={})
    assert found.cause is Cause.KILLED
    assert found.message == "rank 1 on node 1 exited with 75 (saved and stopped after a SIGTERM that Lockstep did not send)"


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("memory allocation of 17179869184 bytes failed", Cause.OUT_OF_MEMORY),
        ("OpenBLAS blas_thread_init: pthread_create failed for thread 5 of 8: Resource temporarily unavailable", Cause.SETUP),
        ("mkdir: cannot create directory '/workspace/x': Permission denied", Cause.STORAGE),
        ("bash: line 1: echo: write error: No space left on device", Cause.STORAGE),
        ("sh: 1: accelerate-9: not found", Cause.SETUP),
        ("cat: /nowhere: No such file or directory", Cause.USER_CODE),
    ],
)
def test_a_program_that_raises_nothing_is_judged_by_its_last_words(words: str, cause: Cause) -> None:
    assert rank_cause(False, 1, None, None, words) is cause
