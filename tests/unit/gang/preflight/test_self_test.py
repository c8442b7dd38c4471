"""The self-test of devices: its program on this machine's CPU, the node's side of it, and what node 0 makes of the facts."""

from __future__ import annotations

import asyncio
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep_gang.agent.preflight import allreduce_rank, programs, selftest_program
from lockstep_gang.agent.preflight.programs import NodeSelfTest, json_objects, read_result
from lockstep_gang.contract.preflight import DeviceResult, Expected, Finding, SelfTest, SelfTestResult, Speed
from lockstep_gang.contract.report import Cause
from lockstep_gang.contract.run import Run
from lockstep_gang.lifecycle.preflight.checks import cause_of
from lockstep_gang.lifecycle.preflight.self_test import judge_self_test, speed_of
from lockstep_spec.choices import Severity
from unit.gang.cases import make_run
from unit.virtual_time import VirtualClock

GOOD = DeviceResult(0, "GPU-1", "H100", 9, 0, "2.15.0", precision="BF16", elements=100, flops=600 * 10**12)


@pytest.mark.parametrize("precision", ["FP32", "BF16", "FP16"])
def test_a_device_that_computes_right_has_every_number_as_it_must_be(precision: str) -> None:
    torch = pytest.importorskip("torch")
    facts = selftest_program.examined(torch, torch.device("cpu"), precision)
    assert (facts["wrong"], facts["elements"], facts["precision"]) == (0, 2 * 256 * 256, precision)
    assert facts["flops"] > 0


@pytest.mark.parametrize("terms", [shape[1] for shape in (selftest_program.GPU_SHAPE, selftest_program.CPU_SHAPE)])
def test_no_number_of_the_result_is_too_large_for_the_least_exact_precision(terms: int) -> None:
    torch = pytest.importorskip("torch")
    rows, columns, exact = selftest_program.factors(torch, terms)
    assert set(rows.unique().tolist()) == set(columns.unique().tolist()) == {-1.0, 0.0, 1.0}
    assert exact.abs().max() <= 256
    assert torch.equal(exact.to(torch.bfloat16).double(), exact)


def test_the_cpu_computes_a_product_of_61_rows_and_columns_for_a_device_s_of_any_size() -> None:
    rows, columns, exact = selftest_program.factors(pytest.importorskip("torch"), 7)
    assert (rows.shape, columns.shape, exact.shape) == ((61, 7), (7, 61), (61, 61))


@pytest.mark.parametrize("value", [1e9, float("nan"), 0.5])
def test_every_wrong_number_is_counted(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    right = torch.Tensor.__matmul__

    def product(left: Any, other: Any) -> Any:
        result = right(left, other)
        if left.dtype == torch.float32:
            result[3, 200] = result[255, 0] = value
        return result

    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    assert selftest_program.examined(torch, torch.device("cpu"), "FP32")["wrong"] == 4  # two in each of two products


def test_an_exception_of_one_device_is_its_own_answer() -> None:
    torch = pytest.importorskip("torch")
    facts = selftest_program.examined(torch, torch.device("cpu"), "FP128")
    assert (facts["index"], facts["error"]) == (0, "KeyError: 'FP128'")


@pytest.mark.parametrize(("capability", "built", "runs"), [
    ((9, 0), ["sm_80", "sm_90"], True),
    ((8, 9), ["sm_80", "sm_86"], True),
    ((8, 0), ["sm_86", "sm_90"], False),
    ((6, 1), ["sm_70", "sm_75", "sm_80"], False),
    ((12, 0), ["sm_80", "sm_90"], False),
    ((12, 0), ["sm_80", "sm_90", "compute_90"], True),
    ((9, 0), ["sm_90a"], True),
    ((9, 3), ["sm_90a"], False),
    ((10, 3), ["sm_100f"], True),
    ((12, 0), ["sm_100f", "compute_100f"], False),
    ((9, 4), ["gfx90a", "gfx942"], True),
])  # fmt: skip
def test_a_build_of_torch_runs_on_cards_of_its_architectures(capability: tuple[int, int], built: list[str], runs: bool) -> None:
    assert selftest_program.has_kernels(capability, built) is runs


def test_a_card_that_torch_has_no_code_for_is_not_asked_to_compute() -> None:
    card = SimpleNamespace(name="GTX 1080", major=6, minor=1, uuid="1234")
    cuda = SimpleNamespace(get_device_properties=lambda device: card, get_arch_list=lambda: ["sm_70", "sm_80"])
    facts = selftest_program.examined(SimpleNamespace(cuda=cuda, __version__="2.15.0"), SimpleNamespace(type="cuda", index=3), "BF16")
    assert facts == {
        "index": 3, "torch": "2.15.0", "name": "GTX 1080", "uuid": "GPU-1234", "major": 6, "minor": 1, "lacking": True,
            "built": "sm_70 sm_80",
    }  # fmt: skip


class PlayedTorch:
    """Torch with two played GPUs, which are the CPU: the second one raises when it is waited for."""

    def __init__(self, torch: Any, present: int = 2) -> None:
        self._torch = torch
        card = SimpleNamespace(name="H100", major=9, minor=0, uuid="1234")
        self.cuda = SimpleNamespace(
            is_available=lambda: present > 0,
            init=lambda: None,
            device_count=lambda: present,
            get_device_properties=lambda device: card,
            get_arch_list=lambda: ["sm_90"],
            synchronize=self._synchronize,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def device(self, kind: str, index: int | None = None) -> Any:
        return SimpleNamespace(type=kind, index=index)

    @staticmethod
    def _synchronize(device: Any) -> None:
        if device.index == 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def lines_of(torch: PlayedTorch, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, precision: str = "") -> bytes:
    """Lines of the program for two GPUs."""
    monkeypatch.setattr(selftest_program, "importlib", SimpleNamespace(import_module=lambda name: torch))
    monkeypatch.setattr(selftest_program, "GPU_SHAPE", (128, 2048))
    monkeypatch.setattr(selftest_program, "ecc_errors", lambda: {"GPU-1234": 1})
    move = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, where: tensor if isinstance(where, SimpleNamespace) else move(tensor, where))
    monkeypatch.setenv("GPUS_PER_NODE", "2")
    selftest_program.main([precision] if precision else [])
    return capsys.readouterr().out.encode()


def test_gpus_are_tested_side_by_side_and_one_that_fails_hides_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = read_result(lines_of(PlayedTorch(pytest.importorskip("torch")), capsys, monkeypatch), 2, None).devices
    assert (good.index, good.uuid, good.name, good.precision, good.wrong, good.error, good.ecc_errors) == (
        0,
        "GPU-1234",
        "H100",
        "BF16",
        0,
        "",
        1,
    )
    assert good.flops > 0
    assert (bad.index, bad.error) == (1, "RuntimeError: CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(("present", "error"), [
    (0, "RuntimeError: torch.cuda.is_available() is False"), (1, "RuntimeError: torch finds 1 of 2 GPUs"),
])  # fmt: skip
def test_gpus_that_torch_can_t_find_are_told(
    present: int, error: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    played = PlayedTorch(pytest.importorskip("torch"), present)
    assert read_result(lines_of(played, capsys, monkeypatch), 2, None) == SelfTestResult(error=error)


def test_uncorrected_errors_are_read_by_uuid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU-1, 3'\necho 'GPU-2, [N/A]'\necho 'GPU-3, 0'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert selftest_program.ecc_errors() == {"GPU-1": 3, "GPU-3": 0}
    monkeypatch.setenv("PATH", "/nowhere")
    assert selftest_program.ecc_errors() == {}


PROGRAM = """
import json, os, sys, time
with open(os.environ["FOLDER"] + "/starts", "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
print("a library greets")
"""
DEVICES = 'print(json.dumps({"device": {"index": 0, "uuid": "GPU-1", "flops": 5}}), flush=True)\n'
DONE = 'print(json.dumps({"done": True, "ecc": {"GPU-1": 2}}), flush=True)\n'


def node(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str, gpus: int = 0) -> tuple[NodeSelfTest, Run]:
    """The self-test of a node, whose program is this one."""
    (folder / "played_self_test.py").write_text(PROGRAM + program)
    monkeypatch.setattr(programs, "PROGRAM_MODULE", "played_self_test")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"PYTHONPATH": path, "FOLDER": str(folder)}
    run = make_run(gpus_per_node=gpus, ranks_per_node=max(1, gpus), preflight=Expected(self_test=SelfTest("BF16")), environment=environment)
    return NodeSelfTest(run, 0), run


def starts(folder: Path) -> list[str]:
    return (folder / "starts").read_text().splitlines()


async def test_a_clean_result_serves_later_starts_until_a_new_one_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, _ = node(tmp_path, monkeypatch, DEVICES + DONE)
    mine.begin()
    results = [await mine.result(60, anew=False), await mine.result(60, anew=False)]
    assert starts(tmp_path) == ["BF16"]
    results.append(await mine.result(60, anew=True))
    assert starts(tmp_path) == ["BF16", "BF16"]
    assert results == [SelfTestResult((DeviceResult(0, "GPU-1", flops=5, ecc_errors=2),))] * 3


async def test_what_failed_is_tested_again_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, _ = node(tmp_path, monkeypatch, 'print(json.dumps({"error": "RuntimeError: busy"}))\n')
    assert [await mine.result(60, anew=False) for _ in range(2)] == [SelfTestResult(error="RuntimeError: busy")] * 2
    assert len(starts(tmp_path)) == 2


async def test_a_device_that_hangs_is_told_and_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, _ = node(tmp_path, monkeypatch, DEVICES + 'print(json.dumps({"stage": "products"}), flush=True)\ntime.sleep(600)\n', gpus=2)
    mine.begin()
    while not (tmp_path / "starts").exists():  # noqa: ASYNC110 (another process writes it)
        await asyncio.sleep(0.01)
    tested = await mine.result(3, anew=False)
    assert [(device.index, device.error) for device in tested.devices] == [(0, ""), (1, "not done after 3 s, in: products")]


async def test_what_a_process_said_that_outlives_its_kill_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As one that hangs in a driver: its pipe doesn't end by the kill.
    keep = (
        'import subprocess\nheld = subprocess.Popen(["sleep", "30"], start_new_session=True)\nopen(os.environ["FOLDER"] + "/held",'
        ' "w").write(str(held.pid))\n'
    )
    said = 'print(json.dumps({"stage": "products"}), flush=True)\ntime.sleep(600)\n'
    mine, _ = node(tmp_path, monkeypatch, keep + DEVICES + said, gpus=2)
    monkeypatch.setattr(programs, "KILLED_SECONDS", 0.2)
    try:
        tested = await mine.result(3, anew=False)
        assert [(device.index, device.error) for device in tested.devices] == [(0, ""), (1, "not done after 3 s, in: products")]
    finally:
        os.kill(int((tmp_path / "held").read_text()), 9)


async def test_nothing_of_it_runs_when_ranks_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        'open(os.environ["FOLDER"] + "/pid", "w").write(str(os.getpid()))\nos.rename(os.environ["FOLDER"] + "/pid",'
        ' os.environ["FOLDER"] + "/there")\ntime.sleep(600)\n'
    )
    mine, _ = node(tmp_path, monkeypatch, program)
    mine.begin()
    while not (tmp_path / "there").exists():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    pid = int((tmp_path / "there").read_text())
    mine.end()
    assert os.waitpid(pid, 0)[1] == 9  # noqa: ASYNC222 (it was killed)


@pytest.mark.parametrize("changes", [{"preflight": None}, {"preflight": Expected()}])
async def test_a_run_that_asks_for_none_starts_no_process(changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = node(tmp_path, monkeypatch, DONE)
    NodeSelfTest(replace(run, **changes), 0).begin()
    await asyncio.sleep(0)
    assert not asyncio.all_tasks() - {asyncio.current_task()}


def test_a_process_that_dies_is_told_with_its_last_line() -> None:
    text = b'{"stage": "import of torch"}\nImportError: libcudart.so.13: cannot open shared object file\n'
    assert read_result(text, 1, None) == SelfTestResult(
        error="ended in import of torch: ImportError: libcudart.so.13: cannot open shared object file"
    )
    assert read_result(b"", 1, 60) == SelfTestResult(error="not done after 60 s, in: start")
    lines = b'{"device": {"index": 1, "flops": 7}}\n{"device": 3}\n{"device": {"index": "x"}}\nSegmentation fault\n'
    assert [(one.index, one.error) for one in read_result(lines, 2, None).devices] == [(1, ""), (0, "ended in start: Segmentation fault")]


def found(device: DeviceResult | None = None, error: str = "", everywhere: bool = False, **changes: Any) -> list[Finding]:
    """What is found when node 1 (or both nodes) has this device or error."""
    run = make_run(**{"gpus_per_node": 1, "addresses": ("x-0.x.ns.svc", "x-1.x.ns.svc"), **changes})
    odd = SelfTestResult(error=error) if device is None else SelfTestResult((device,))
    return judge_self_test(run, {0: odd if everywhere else SelfTestResult((GOOD,)), 1: odd})


def test_nothing_is_found_on_devices_that_compute_right() -> None:
    assert found(GOOD) == found(replace(GOOD, ecc_errors=0)) == []


@pytest.mark.parametrize(("device", "check", "cause", "words", "fix"), [
    (replace(GOOD, index=3, wrong=12), "selfTest", Cause.HARDWARE,
     "GPU 3 (GPU-1, H100) of node 1 (x-1) computes wrong: 12 of 100 numbers of a product in BF16 are not what they must be",
         "nvidia-smi --gpu-reset"),
    (replace(GOOD, error="RuntimeError: CUDA error: unspecified launch failure"), "selfTest", Cause.HARDWARE,
     "GPU 0 (GPU-1, H100) of node 1 (x-1) failed the self-test: RuntimeError: CUDA error: unspecified launch failure", "Xid"),
    (replace(GOOD, error="OutOfMemoryError: CUDA out of memory"), "selfTest", Cause.HARDWARE, "CUDA out of memory",
        "which process holds its memory"),
    (DeviceResult(0, "GPU-1", "GTX 1080", 6, 1, "2.15.0", lacking=True, built="sm_70 sm_80"), "torchBuild", Cause.SETUP,
     "torch 2.15.0 has no code for sm_61, which GPU 0 (GPU-1, GTX 1080) of node 1 (x-1) is: it is built for sm_70 sm_80",
         "an image whose torch is built"),
    (DeviceResult(5, error="not done after 60 s, in: products"), "selfTest", Cause.HARDWARE, "GPU 5 of node 1 (x-1) failed", "nvidia-smi"),
])  # fmt: skip
def test_a_bad_device_is_named_with_its_node_and_left_out(device: DeviceResult, check: str, cause: Cause, words: str, fix: str) -> None:
    (finding,) = found(device)
    assert (finding.check, finding.severity, finding.node, cause_of(finding)) == (check, Severity.ERROR, 1, cause)
    assert words in finding.message
    assert fix in finding.fix
    assert (finding.excludes, finding.final) == (True, False)


def test_a_torch_that_fits_no_node_is_final_and_no_node_s_fault() -> None:
    findings = found(replace(GOOD, lacking=True, built="sm_70"), everywhere=True)
    assert [(one.excludes, one.final) for one in findings] == [(False, True)] * 2
    assert [(one.excludes, one.final) for one in found(replace(GOOD, wrong=1), everywhere=True)] == [(False, False)] * 2


def test_a_node_whose_gpus_can_t_be_used_at_all_is_told_with_why() -> None:
    (finding,) = found(error="RuntimeError: Found no NVIDIA driver on your system.")
    assert finding.message == "the self-test of node 1 (x-1) can't use its GPUs: RuntimeError: Found no NVIDIA driver on your system."
    (finding,) = found(error="ImportError: no", gpus_per_node=0)
    assert finding.message == "the self-test of node 1 (x-1) can't use its CPU: ImportError: no"


def test_errors_of_the_memory_warn_and_stop_nothing() -> None:
    (finding,) = found(replace(GOOD, ecc_errors=2))
    assert (finding.severity, finding.excludes) == (Severity.WARNING, False)
    assert finding.message == "GPU 0 (GPU-1, H100) of node 1 (x-1) has had 2 uncorrected ECC errors since its driver was loaded"


def test_the_speed_is_that_of_the_slowest_and_the_fastest_that_passed() -> None:
    run = make_run(gpus_per_node=2, ranks_per_node=2)
    tested = {0: SelfTestResult((GOOD, replace(GOOD, index=1, flops=641 * 10**12))), 1: SelfTestResult((replace(GOOD, flops=1, wrong=1),))}
    speed = speed_of(run, tested)
    assert speed == Speed(2, True, "BF16", 600 * 10**12, 641 * 10**12)
    assert speed.words == "2 GPUs compute right, 600 to 641 TFLOP/s in BF16"
    assert Speed(1, False, "FP32", 45 * 10**9, 45 * 10**9).words == "1 CPU computes right, 0.045 TFLOP/s in FP32"
    assert speed_of(run, {0: SelfTestResult(error="no")}) is None


@pytest.mark.parametrize(("first", "count"), [(0.39, 5), (0.41, 1)])
def test_an_all_reduce_that_takes_long_is_measured_once(monkeypatch: pytest.MonkeyPatch, first: float, count: int) -> None:
    monkeypatch.setattr(allreduce_rank, "all_reduce_seconds", lambda *_: first)
    agreed = SimpleNamespace(item=lambda: first)
    dist: Any = SimpleNamespace(all_reduce=lambda *_, **__: None, ReduceOp=SimpleNamespace(MAX=0))
    assert len(allreduce_rank.times(SimpleNamespace(tensor=lambda *_, **__: agreed), dist, SimpleNamespace(device="cpu"))) == count


@pytest.mark.parametrize(("gpus", "size"), [(0, 8 << 20), (8, 256 << 20)])
def test_an_all_reduce_is_one_of_so_many_bytes_after_one_of_a_mebibyte(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gpus: int, size: int
) -> None:
    reduced: list[int] = []
    nothing: Any = lambda *_, **__: None  # noqa: E731
    torch = SimpleNamespace(
        ones=lambda count, device: SimpleNamespace(bytes=4 * count, device=device, is_cuda=False),
        tensor=lambda values, device: SimpleNamespace(bytes=4, item=lambda: values[0]),
    )
    dist = SimpleNamespace(
        all_reduce=lambda tensor, **_: reduced.append(tensor.bytes), ReduceOp=SimpleNamespace(MAX=0),
        barrier=nothing, init_process_group=nothing, destroy_process_group=nothing,
    )  # fmt: skip
    monkeypatch.setattr(allreduce_rank, "torch_on_device", lambda: (torch, dist, "a device"))
    monkeypatch.setattr(allreduce_rank, "store", nothing)
    for name, value in {"LOCKSTEP_SECONDS": 30, "RANK": 0, "WORLD_SIZE": 2, "GPUS_PER_NODE": gpus}.items():
        monkeypatch.setenv(name, str(value))
    allreduce_rank.measure()
    assert reduced[:2] == [1 << 20, size] == [1 << 20, json_objects(capsys.readouterr().out.encode())[-1]["bytes"]]


@pytest.mark.parametrize(("seconds", "count"), [(0.42, 7), (0.44, 1)])
def test_a_size_of_a_sweep_of_which_seven_take_three_seconds_is_measured_once(
    monkeypatch: pytest.MonkeyPatch, seconds: float, count: int
) -> None:
    done: list[float] = []
    monkeypatch.setattr(allreduce_rank, "all_reduce_seconds", lambda *_: done.append(seconds) or seconds)
    monkeypatch.setattr(allreduce_rank, "_agreed", lambda *each: each[-1])
    torch = SimpleNamespace(ones=lambda size, device: SimpleNamespace(numel=lambda: size))
    allreduce_rank.measure_size(torch, SimpleNamespace(get_world_size=lambda: 2), "cpu", 1024)
    assert len(done) == 2 + count


class Matrix:
    """All matrices of a product, and what they are compared to."""

    def __getitem__(self, places: object) -> Matrix:
        return self

    def __ne__(self, other: object) -> Matrix:  # type: ignore[override]
        return self

    def to(self, where: object = None) -> Matrix:
        return self

    cpu = to

    def sum(self) -> int:
        return 0


def test_a_gpu_multiplies_for_a_twentieth_of_a_second_eight_times_between_two_looks_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, done, matrix = VirtualClock(), list[float](), Matrix()
    monkeypatch.setattr(selftest_program, "time", clock)
    monkeypatch.setattr(selftest_program, "factors", lambda *_: (matrix, matrix, matrix))
    monkeypatch.setattr(Matrix, "__matmul__", lambda *_: done.append(clock.now) or matrix, raising=False)
    torch = SimpleNamespace(arange=lambda size: size, cuda=SimpleNamespace(synchronize=lambda device: clock.sleep(0.02)))
    selftest_program.product(torch, SimpleNamespace(type="cuda"), "bfloat16")
    assert [done.count(at) for at in dict.fromkeys(done)] == [1, 8, 8, 8]


@pytest.mark.parametrize("terms", [256, 257])
def test_a_number_of_the_product_above_256_is_the_cpu_s_fault(terms: int) -> None:
    torch = pytest.importorskip("torch")
    ones = SimpleNamespace(Generator=torch.Generator, randint=lambda least, most, shape, **_: torch.ones(shape))
    with pytest.raises(ArithmeticError) if terms > 256 else nullcontext():
        selftest_program.factors(ones, terms)
