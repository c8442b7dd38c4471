"""NCCL's flight recorder is on before ranks meet, as far as the user did not set it, and its record is written where there is one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep_train.watch.watchdog import _records, switch_on_recorder, write_flight_record

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
        {"_dump_nccl_trace_json": lambda: EMPTY, "_dump_fr_trace_json": lambda backend: RECORD if backend == "nccl2" else EMPTY},
        {"_dump_nccl_trace_json": lambda: RECORD, "_dump_fr_trace_json": lambda backend: EMPTY},
    ],
    ids=["older torch", "nccl2", "TORCH_DIST_USE_NCCL2=0"],
)
def test_a_rank_on_a_gpu_writes_the_record_of_the_backend_that_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, functions: dict[str, object]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_with(**functions))  # type: ignore[arg-type]  # stands for it
    write_flight_record(tmp_path / "nccl.json")
    assert (tmp_path / "nccl.json").read_bytes() == RECORD


def test_the_installed_torch_has_the_functions_that_are_called() -> None:
    from torch._C import _distributed_c10d  # type: ignore[attr-defined]

    assert ["version" in json.loads(record) for record in _records(_distributed_c10d)] == [True, True]


@pytest.mark.parametrize("torch", [None, torch_with(gpu=False, _dump_nccl_trace_json=lambda: RECORD), torch_with()])
def test_where_there_is_no_record_no_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: SimpleNamespace | None
) -> None:
    """Before torch was imported, on a CPU, and in a torch that was built without NCCL."""
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]  # stands for it
    write_flight_record(tmp_path / "nccl.json")
    assert list(tmp_path.iterdir()) == []
