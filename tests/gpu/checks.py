"""What must hold on a GPU as it does on CPUs. Each check takes a Scene, and raises AssertionError, or NotHere with what this machine can't
show.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from scene import STEPS, NotHere, Refused, Scene, stop, whole

import lockstep_gang
from lockstep_gang.agent.preflight.programs import is_clean, read_result
from lockstep_gang.contract.fabric import RankFabric
from lockstep_gang.lifecycle.fabric.nccl import read_line
from support.rounding import UNIT, forward_roundings, gradient_roundings, tolerance

FORWARD = forward_roundings(hidden=128, intermediate=344, attention=128, vocabulary=1024, sequence=64, layers=4)
SAME = {"FP32": STEPS * tolerance(gradient_roundings(FORWARD, 4 * 64)), "BF16": UNIT["BF16"]}
"""Relative, of a step's loss after the same steps before it, on another device, over other ranks or in another precision. In BF16 a loss is
the mean of 256 numbers that are rounded each for itself: far less than one rounding, and on CPUs 1e-4; what six steps learn is 5e-2.
"""
ALONE = {"cuda": 3e-2, "cpu": 1e-5}
"""Relative, of the loss and of the whole gradient, between documents that are joined and each by itself: in BF16 on a GPU, in FP32 on a
CPU.
"""
DUPLICATE = ("Duplicate GPU detected", "ncclInvalidUsage")


def same_losses(scene: Scene, name: str, reference: str, precision: str = "FP32") -> None:
    mine, other = scene.losses(name), scene.losses(reference)
    assert len(mine) == len(other) == STEPS, (name, mine, other)
    worst = max(abs(first - second) / second for first, second in zip(mine, other, strict=True))
    assert worst <= SAME[precision], f"losses of {name} differ from those of {reference} by {worst:.2e}: {mine}, {other}"


def reference(scene: Scene) -> str:
    """Return the name of the run of one process on a CPU, under Stage2 in FP32. It trains once."""
    if not (scene.folder / "reference").exists():
        run = scene.run_file("reference")
        whole(scene.train(run, device="cpu"), "the reference")
    return "reference"


def one_rank_trains_as_one_process_on_a_cpu(scene: Scene, precision: str = "FP32") -> None:
    for stage in (1, 2, 3):
        name = f"alone-{stage}-{precision}"
        whole(scene.train(scene.run_file(name, stage, precision)), name)
        same_losses(scene, name, reference(scene), precision)


def one_rank_trains_in_bf16_as_one_process_on_a_cpu(scene: Scene) -> None:
    one_rank_trains_as_one_process_on_a_cpu(scene, "BF16")


def two_ranks_train_as_one_process(scene: Scene, precision: str = "FP32") -> None:
    """On one card NCCL refuses two ranks, so their collectives go through gloo, which may lack one that a stage needs."""
    refused = {}
    for stage in (1, 2, 3):
        name = f"pair-{stage}-{precision}"
        ended = scene.train(scene.run_file(name, stage, precision), 2, ["--gloo"])
        missing = next((line for line in ended.output.splitlines() if "gloo" in line.lower() and "support" in line.lower()), None)
        if scene.device == "cuda" and ended.codes != [0, 0] and missing is not None:
            refused[stage] = missing.strip()
            continue
        whole(ended, name)
        same_losses(scene, name, reference(scene), precision)
    if refused:
        raise NotHere(f"gloo between two ranks on one card: {refused}; the other stages hold")


def two_ranks_train_in_bf16_as_one_process(scene: Scene) -> None:
    two_ranks_train_as_one_process(scene, "BF16")


def joined_documents_are_computed_as_each_by_itself(scene: Scene) -> str:
    """Require right results, by torch's varlen attention on a GPU of Ampere or newer. Raises Refused with the reason why a kernel isn't
    used.
    """
    path = scene.folder / "joined.json"
    whole(scene.train(scene.run_file("joined"), 1, ["--joined", str(path)]), "the attention of joined documents")
    results, lines = json.loads(path.read_text()), []
    for family, result in results.items():
        lines.append(f"{family}: {result['words']}; refused: {result['refused']}; away: {result['loss']:.1e}, {result['gradient']:.1e}")
        assert not result["problem"], (lines[-1], result["problem"])
        assert max(result["loss"], result["gradient"]) <= ALONE[scene.device], lines[-1]
        assert scene.device == "cpu" or result["used"] or result["reason"], lines[-1]
    if scene.device == "cpu":
        raise NotHere("\n".join(["kernels for joined documents, which need a GPU; without them", *lines]))
    if not all(result["used"] for result in results.values()):
        raise Refused("\n".join(lines))
    return "\n".join(lines)


def a_snapshot_beside_the_next_step_is_bitwise_that_of_its_step(scene: Scene) -> None:
    ended = scene.train(scene.run_file("snapshot"), 1, ["--case", "copy_beside_a_step"])
    whole(ended, "the snapshot")


def a_stop_saves_and_the_next_start_goes_on(scene: Scene) -> None:
    """Asked to stop as soon as a commit is being written; what both starts trained is what one process trains."""
    run = scene.run_file("stopped", every=1)
    processes = scene.start(run)
    folder = scene.folder / "stopped" / "checkpoints"
    deadline = time.monotonic() + 120
    while not list(folder.glob("step-*")) and processes[0].poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    stop(processes)
    ended = scene.wait(run, processes)
    assert ended.codes == [75], f"asked to stop, it ended with {ended.codes}:\n{ended.output[-3000:]}"
    taken = len(scene.losses("stopped"))
    assert 0 < taken < STEPS, f"stopped after {taken} of {STEPS} steps"
    assert scene.commits("stopped")[-1] == taken, (scene.commits("stopped"), taken)
    whole(scene.train(run), "the run that goes on")
    same_losses(scene, "stopped", reference(scene))


def memory_that_is_exhausted_ends_with_its_exit_code_and_advice(scene: Scene) -> None:
    ended = scene.train(scene.run_file("exhausted"), 1, ["--exhaust"])
    assert ended.codes == [77], f"out of memory, it ended with {ended.codes}:\n{ended.output[-3000:]}"
    assert "out of memory" in ended.output.lower(), ended.output[-3000:]


def nccl_says_what_it_uses_and_its_collectives_are_recorded(scene: Scene) -> None:
    if scene.device != "cuda":
        raise NotHere("NCCL needs a GPU")
    record = scene.folder / "flight.json"
    run = scene.run_file("nccl")
    ended = scene.train(run, 1, ["--record", str(record)], NCCL_DEBUG="INFO")
    whole(ended, "the run over NCCL")
    fabric = RankFabric(0)
    for line in ended.output.splitlines():
        fabric = read_line(fabric, line)
    assert fabric.version, "no line of NCCL's log names its version"
    entries = json.loads(record.read_text())["entries"]
    assert any("all_reduce" in entry["profiling_name"] for entry in entries), sorted({entry["profiling_name"] for entry in entries})
    pair = scene.run_file("nccl-pair")
    ended = scene.train(pair, 2, [], NCCL_DEBUG="WARN")
    if ended.codes != [0, 0]:
        assert any(words in ended.output for words in DUPLICATE), ended.output[-3000:]
        raise NotHere("two ranks over NCCL on one card, which NCCL refuses; one rank's log and record hold")
    same_losses(scene, "nccl-pair", reference(scene))


def the_self_test_of_preflight_finds_every_device_right(scene: Scene) -> None:
    import torch

    gpus = torch.cuda.device_count() if scene.device == "cuda" else 0
    for precision in ("BF16", "FP16", "FP32"):
        command = [sys.executable, "-m", "lockstep_gang.agent.preflight.selftest_program", precision]
        variables = {**os.environ, "GPUS_PER_NODE": str(gpus), "PYTHONPATH": str(Path(lockstep_gang.__file__).parent.parent)}
        ended = subprocess.run(command, env=variables, capture_output=True, check=False)
        tested = read_result(ended.stdout, max(1, gpus), None)
        assert is_clean(tested), (tested, ended.stderr[-3000:])
        assert len(tested.devices) == max(1, gpus)


CHECKS: tuple[Callable[[Scene], str | None], ...] = (
    the_self_test_of_preflight_finds_every_device_right,
    one_rank_trains_as_one_process_on_a_cpu,
    joined_documents_are_computed_as_each_by_itself,
    one_rank_trains_in_bf16_as_one_process_on_a_cpu,
    two_ranks_train_as_one_process,
    two_ranks_train_in_bf16_as_one_process,
    a_snapshot_beside_the_next_step_is_bitwise_that_of_its_step,
    a_stop_saves_and_the_next_start_goes_on,
    memory_that_is_exhausted_ends_with_its_exit_code_and_advice,
    nccl_says_what_it_uses_and_its_collectives_are_recorded,
)
