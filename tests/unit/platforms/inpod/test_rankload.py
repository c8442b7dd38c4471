"""What a node and its ranks use: the part of the program in pods and on hosts that measures it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.platforms.inpod import rankload

H100 = {"index": 0, "uuid": "GPU-aaa", "name": "H100"}
ROW = "0, GPU-aaa, NVIDIA H100, 1024, 81559, 97, 71, 655.32, 700.00"


def test_memory_is_the_container_s_and_unlimited_is_no_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert rankload.container_memory(tmp_path) == {"bytes": 1000}
    (tmp_path / "memory.max").write_text("5000\n")
    assert rankload.container_memory(tmp_path) == {"bytes": 1000, "limitBytes": 5000}
    assert rankload.container_memory(tmp_path / "none") == {}


def test_cpu_time_is_the_container_s_by_both_versions_of_cgroups(tmp_path: Path) -> None:
    assert rankload.container_seconds(tmp_path) is None
    (tmp_path / "cpuacct").mkdir()
    (tmp_path / "cpuacct/cpuacct.usage").write_text("2500000000\n")
    assert rankload.container_seconds(tmp_path) == 2.5
    (tmp_path / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")
    assert rankload.container_seconds(tmp_path) == 1.5


def test_a_machine_s_cpu_is_what_is_not_idle_and_its_memory_what_is_not_available(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    (tmp_path / "stat").write_text(f"cpu  {3 * ticks} 0 {ticks} {9 * ticks} {7 * ticks} 0 0 {ticks} 0 0\ncpu0 1 1\n")
    (tmp_path / "meminfo").write_text("MemTotal:  1000 kB\nMemFree:  1 kB\nMemAvailable:  400 kB\n")
    assert rankload.machine_seconds(tmp_path) == 5.0
    assert rankload.machine_memory(tmp_path) == {"bytes": 600 << 10, "limitBytes": 1000 << 10}
    assert rankload.machine_seconds(tmp_path / "none") is None and rankload.machine_memory(tmp_path / "none") == {}


def tool(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """An nvidia-smi that runs this."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_gpus_are_what_the_driver_s_tool_says_and_what_it_does_not_know_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(
        tmp_path,
        monkeypatch,
        f"echo '{ROW}'\necho '1, GPU-bbb, NVIDIA H100, 0, 81559, [N/A], 30, [N/A], [N/A]'\necho WARNING: infoROM is corrupted",
    )
    first, second = rankload.gpus(tmp_path)[0]
    assert first == {
        "index": 0, "uuid": "GPU-aaa", "name": "NVIDIA H100", "bytes": 1 << 30, "limitBytes": 81559 << 20, "percentage": 97, "celsius": 71,
        "watts": 655, "limitWatts": 700,
    }  # fmt: skip
    assert second == {"index": 1, "uuid": "GPU-bbb", "name": "NVIDIA H100", "bytes": 0, "limitBytes": 81559 << 20, "celsius": 30}


@pytest.mark.parametrize(
    ("devices", "script", "problem"),
    [
        ([], None, ""),
        (["nvidia0", "nvidiactl"], None, "nvidia-smi is not on the PATH"),
        (["kfd"], None, "AMD GPUs are not shown"),
        ([], "echo 'No devices were found'; exit 6", ""),
        (["nvidia0"], "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "Driver/library version mismatch"),
    ],
)
def test_a_tool_that_is_absent_or_fails_is_told_where_there_are_gpus(
    devices: list[str], script: str | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dev = tmp_path / "dev"
    dev.mkdir()
    for name in devices:
        (dev / name).touch()
    if script is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        tool(tmp_path, monkeypatch, script)
    gpus, told = rankload.gpus(tmp_path)
    assert gpus == [] and problem in told and bool(told) is bool(problem)


@pytest.mark.parametrize(
    ("variables", "index"),
    [
        ({"LOCAL_RANK": "1"}, 1),
        ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "GPU-bbb, GPU-aa"}, 0),
        ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": ""}, None),
        ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "MIG-1"}, None),
        ({"LOCAL_RANK": "2"}, None),
        ({}, None),
    ],
)
def test_a_rank_s_gpu_is_that_of_its_place_among_those_it_sees(variables: dict[str, str], index: int | None) -> None:
    assert rankload.gpu_of(variables, [H100, {**H100, "index": 1, "uuid": "GPU-bbb"}]) == index


def test_of_unlike_gpus_none_is_guessed_unless_their_order_is_stated() -> None:
    unlike: list[dict[str, Any]] = [H100, {"index": 1, "uuid": "GPU-bbb", "name": "L4"}]
    assert rankload.gpu_of({"LOCAL_RANK": "1"}, unlike) is None
    assert rankload.gpu_of({"LOCAL_RANK": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, unlike) == 1
    assert rankload.gpu_of({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "GPU-aaa,GPU-bbb"}, unlike) == 1


BURNS = "import sys\nblock = bytearray(64 << 20)\nblock[:] = b'x' * len(block)\nprint('here', flush=True)\nwhile True: pass"
SLEEPS = "import sys, time\nprint('here', flush=True)\ntime.sleep(1000)"


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Path]:
    """Processes as agents start them: rank 3 with a child that computes, rank 4 that waits, and rank 5 of another run."""
    processes = []
    for number, (rank, code, run) in enumerate(((3, SLEEPS, "mine"), (3, BURNS, "mine"), (4, SLEEPS, "mine"), (5, SLEEPS, "other"))):
        path = tmp_path / f"{run}.json"
        path.write_text(json.dumps({"runDir": str(tmp_path / run)}))
        variables = {"RANK": str(rank), "LOCKSTEP_ATTEMPT": "1", "LOCKSTEP_RUN": str(path), "LOCAL_RANK": str(rank)}
        process = subprocess.Popen(
            [sys.executable, "-c", code], env={**os.environ, **variables}, start_new_session=number != 1, stdout=subprocess.PIPE
        )
        processes.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"here\n"
    yield tmp_path / "mine"
    for process in processes:
        process.kill()
        process.communicate()


def test_a_rank_has_the_cpu_and_memory_of_all_its_processes_and_other_runs_are_left_out(ranks: Path) -> None:
    load = rankload.Load(str(ranks))
    while (answer := load.answer())["rankLoads"][0]["cores"] == 0:  # the kernel counts in hundredths of a second
        pass
    busy, idle = answer["rankLoads"]
    assert answer["ranks"] == [3, 4] == [busy["rank"], idle["rank"]]
    assert busy["cores"] > idle["cores"] and "gpu" not in busy
    assert 64 << 20 < busy["bytes"] < 200 << 20 and idle["bytes"] < 64 << 20
    assert 0 < answer["memory"]["bytes"] < answer["memory"]["limitBytes"]
