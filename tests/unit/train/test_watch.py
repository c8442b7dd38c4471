"""The watchdog: the message of a hang, its limits, and warnings about variables that nothing reads. NCCL's flight recorder is switched on
before the ranks meet unless the user set it, and its record is written if there is one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch._C import _distributed_c10d

from lockstep_train.base.errors import exit_code_of
from lockstep_train.base.limits import step_seconds
from lockstep_train.base.runfile import ignored_variables
from lockstep_train.watch.beats import Beat, explain
from lockstep_train.watch.watchdog import StopSignal, Watchdog, _records, switch_on_recorder, write_flight_record

FIRST_STEP_SECONDS = 1800.0

FORWARD = Beat(40, "Step 12", "forward of micro-batch 1 of 2", 130.0, 7)
WAITING = Beat(43, "Step 12", "waiting for the other ranks' losses", 130.0, 7)


def later(beats: dict[int, Beat], *silent: int) -> dict[int, Beat]:
    return {rank: beat if rank in silent else replace(beat, number=beat.number + 2) for rank, beat in beats.items()}


def said(beats: dict[int, Beat], *silent: int, ranks: int = 3) -> str:
    return explain(WAITING, 120.0, beats, later(beats, *silent), ranks)


def test_a_hang_names_the_rank_that_the_others_wait_for_and_where_it_was() -> None:
    message = said({0: WAITING, 1: FORWARD, 2: WAITING})
    assert message == "Step 12 has not ended within 120 s: rank 1 has not finished it, last seen in Step 12, forward of micro-batch 1 of 2"


def test_a_rank_of_an_earlier_step_is_behind() -> None:
    assert "rank 2 is behind, last seen in Save of step 11" in said({0: WAITING, 1: WAITING, 2: Beat(30, "Save of step 11", "", 9.0, 3)})


def test_a_rank_whose_process_does_not_run_is_named_even_where_it_is_at_the_same_place() -> None:
    assert "rank 1 does not answer any more" in said({0: WAITING, 1: WAITING, 2: WAITING}, 1)


def test_ranks_that_all_wait_at_one_place_put_the_blame_on_what_is_between_them() -> None:
    assert "all ranks are in Step 12, waiting for the other ranks' losses" in said({0: WAITING, 1: WAITING, 2: WAITING})


@pytest.mark.parametrize(
    ("gpus", "blamed"), [(False, "the network or the storage between them"), (True, "a GPU, the network between them or the storage")]
)
def test_with_gpus_one_of_them_may_be_what_hangs(gpus: bool, blamed: str) -> None:
    beats = {0: WAITING, 1: WAITING}
    assert explain(WAITING, 120.0, beats, later(beats), 2, gpus=gpus).endswith(f"so what hangs is {blamed}")


def test_ranks_that_were_never_heard_of_are_named() -> None:
    assert "nothing was heard of ranks 1, 2" in said({0: WAITING})


@pytest.mark.parametrize(
    ("configured", "durations", "seconds"),
    [
        (None, [], FIRST_STEP_SECONDS),
        (None, [1.0, 2.0, 90.0], 120.0),
        (None, [60.0, 90.0, 500.0], 270.0),
        (40, [60.0], 40.0),
        (40, [], 40.0),
    ],
)
def test_a_step_may_take_three_medians_and_never_less_than_two_minutes_unless_configured(
    configured: int | None, durations: list[float], seconds: float
) -> None:
    assert step_seconds(configured, durations) == seconds


def test_nccl_timeout_gets_a_line_that_names_the_setting() -> None:
    assert ignored_variables({"PATH": "/bin"}) == []
    [line] = ignored_variables({"NCCL_TIMEOUT": "3600"})
    assert "NCCL_TIMEOUT=3600 has no effect" in line
    assert "spec.hangTimeouts.collectiveSeconds" in line


def test_a_collective_that_timed_out_counts_as_a_hang() -> None:
    assert exit_code_of(RuntimeError("[…/pair.cc:150] Timed out waiting 10000ms for recv operation to complete")) == 76
    assert exit_code_of(RuntimeError("NCCL operation timed out")) == 76
    assert exit_code_of(RuntimeError("shape mismatch")) == 1


def test_another_thread_learns_of_sigterm_while_the_main_thread_is_busy() -> None:
    before, fd = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
    try:
        stop = StopSignal()
        stop.install()
        seen = threading.Event()
        threading.Thread(target=lambda: (stop.wait(30), seen.set() if stop.requested else None)).start()
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen.wait(30)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.set_wakeup_fd(fd)


NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE")
RECORD = b'{"entries":[{"profiling_name":"nccl2:all_reduce"}],"version":"2.10"}'
EMPTY = b'{"pg_config":{},"version":"2.10"}'


def torch_with(gpu: bool = True, **functions: object) -> SimpleNamespace:
    return SimpleNamespace(
        cuda=SimpleNamespace(is_available=lambda: gpu), _C=SimpleNamespace(_distributed_c10d=SimpleNamespace(**functions))
    )


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ({}, ("2000", "1", "/run/logs/nccl-timeout-rank-")),
        ({"TORCH_FR_BUFFER_SIZE": "0"}, ("0", "1", "/run/logs/nccl-timeout-rank-")),
        (dict.fromkeys(NAMES, "mine"), ("mine", "mine", "mine")),
    ],
)
def test_the_recorder_is_switched_on_and_what_the_user_set_stays(
    monkeypatch: pytest.MonkeyPatch, user: dict[str, str], expected: tuple[str, ...]
) -> None:
    monkeypatch.setattr(os, "environ", {**user})
    switch_on_recorder(Path("/run/logs"))
    assert tuple(os.environ[name] for name in NAMES) == expected


@pytest.mark.parametrize(
    "functions",
    [
        {"_dump_nccl_trace_json": lambda: RECORD},
        {"_dump_nccl_trace_json": lambda: RECORD, "_dump_fr_trace_json": lambda includeCollectives=None, onlyActive=None: EMPTY},
        {"_dump_nccl_trace_json": lambda: EMPTY, "_dump_fr_trace_json": lambda backend: RECORD if backend == "nccl2" else EMPTY},
        {"_dump_nccl_trace_json": lambda: RECORD, "_dump_fr_trace_json": lambda backend: EMPTY},
    ],
    ids=["older torch", "torch 2.11", "nccl2", "TORCH_DIST_USE_NCCL2=0"],
)
def test_a_rank_on_a_gpu_writes_the_record_of_the_backend_that_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, functions: dict[str, object]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_with(**functions))  # type: ignore[arg-type]  # stands for it
    write_flight_record(tmp_path / "nccl.json")
    assert (tmp_path / "nccl.json").read_bytes() == RECORD


def test_the_installed_torch_has_the_functions_that_are_called() -> None:
    assert ["version" in json.loads(record) for record in _records(_distributed_c10d)] == [True, True]


@pytest.mark.parametrize("torch", [None, torch_with(gpu=False, _dump_nccl_trace_json=lambda: RECORD), torch_with()])
def test_where_there_is_no_record_no_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: SimpleNamespace | None
) -> None:
    """Before torch was imported, on a CPU, and in a torch that was built without NCCL."""
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]  # stands for it
    write_flight_record(tmp_path / "nccl.json")
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_does_not_answer_holds_a_rank_s_watchdog_up_for_five_seconds() -> None:
    limits: list[timedelta] = []
    made = Watchdog.__new__(Watchdog)
    made.joined(cast(Any, SimpleNamespace(set_timeout=limits.append)), 2)
    assert limits == [timedelta(seconds=5)]
