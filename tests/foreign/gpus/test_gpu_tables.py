"""GPUs of hosts as drivers, kernels and buses tell of them: whose fault an Xid is, which GPU is lost, whose memory it has, and whether it
is divided.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.plan.ahead.forecast import RunFacts, forecast
from lockstep.plan.hosts.check import host_findings
from lockstep.plan.hosts.condition import HostCondition, HostLook, read_condition
from lockstep.plan.hosts.facts import HostFacts, HostGpu
from lockstep.plan.hosts.planned import HostsAsked, cards_of, hosts_plan
from lockstep.platforms.onhost import look
from lockstep.platforms.onhost.condition import gpu_errors
from lockstep_gang.agent.preflight.facts import gpu_facts
from lockstep_gang.contract.preflight import GpuFacts
from lockstep_machine.cards import lost_gpus
from lockstep_spec.codec import from_json
from lockstep_spec.families import shape_from_config
from support.hosts_told import CLUSTER, facts, gpu, placed

HERE = Path(__file__).parent
LOGS, ROWS, BUSES = (yaml.safe_load((HERE / name).read_text()) for name in ("kernel_logs.yaml", "nvidia_smi.yaml", "pci.yaml"))
BUS = ("18", "3b", "86", "af")
GPUS = tuple(gpu(index, bus=f"00000000:{bus.upper()}:00.0") for index, bus in enumerate(BUS))


def judged(host: HostFacts, condition: HostCondition) -> list[tuple[str, str, str]]:
    look = HostLook(CLUSTER.hosts.hosts[0], host, condition)
    found = host_findings([look], CLUSTER.hosts, "lab", {})
    return [(one.outcome.value, one.message, one.fix) for one in found if any(w in one.message for w in ("GPU", "kernel"))]


@pytest.mark.parametrize("case", LOGS, ids=range(len(LOGS)))
def test_each_gpu_s_first_error_is_the_program_s_the_card_s_or_nvlink_s(case: dict[str, Any]) -> None:
    condition = read_condition("lab0", {"openFiles": 1 << 20, "gpuErrors": gpu_errors(case["log"])})
    found = judged(facts("lab0", "10.0.0.1", *GPUS), condition)
    assert [outcome for outcome, _, _ in found] == [outcome for outcome, _ in case["says"]]
    assert all(words in message for (_, message, _), (_, words) in zip(found, case["says"], strict=True)), found


FIELDS = [*look.GPU_FIELDS, "memory.used", "utilization.gpu", "temperature.gpu", "power.draw", *look.GPU_MORE]


@pytest.mark.parametrize("case", ROWS, ids=range(len(ROWS)))
def test_a_row_of_nvidia_smi_is_a_gpu_or_says_why_it_is_none(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "described_gpus", lambda *_: ([dict(zip(FIELDS, case["row"].split(", "), strict=True))], ""))
    monkeypatch.setattr(look, "gpu_users", lambda *_: ({}, ""))
    gpus, problem = look.gpus(128_000_000_000)
    if "problem" in case:
        assert not gpus and case["problem"] in problem
    else:
        one = from_json(HostGpu, gpus[0], "GPU")
        assert [one.memory >> 30, "host" if one.shared else "own", "divided" if one.divided else "whole"] == case["gpu"] and not problem


@pytest.mark.parametrize("case", BUSES, ids=[case["why"] for case in BUSES])
def test_a_gpu_is_lost_that_its_driver_has_on_the_bus_and_does_not_show(case: dict[str, Any], tmp_path: Path) -> None:
    for address, (kind, driver) in case["bus"].items():
        device = tmp_path / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text(kind + "\n")
        if driver:
            (device / "driver").symlink_to(f"../../drivers/{driver}")
    (tmp_path / "dev").mkdir()
    for name in (*(f"nvidia{number}" for number in case["nodes"]), "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).write_text("")
    words = lost_gpus(case["smi"], tmp_path)
    assert bool(words) == bool(case["lost"]) and all(address in words for address in case["lost"])


def test_a_divided_gpu_is_said_at_a_check_and_in_a_plan() -> None:
    host = facts("lab0", "10.0.0.1", gpu(0, divided=True))
    ((outcome, message, fix),) = judged(host, HostCondition(open_files=1 << 20))
    assert outcome == "warning" and "GPU 0 (H100) is divided (MIG)" in message and "nvidia-smi -i 0 -mig 0" in fix
    told = HostsAsked({"lab0": host}, (), tuple(placed(host, job=JOB)))
    assert any(
        "divided (MIG)" in one.message
        for one in hosts_plan(told.seats[0].resolved, ["lab0"], told, forecast(told.seats[0].resolved, RunFacts()))
    )


JOB = """
apiVersion: lockstep.dev/v1alpha1
kind: TrainingJob
metadata: {name: x}
spec:
  nodes: 1
  gpusPerNode: 1
  training:
    method: Full
    model: {name: /workspace/models/m}
    data: {path: /datasets/d.jsonl, maxLength: 128}
    optimization: {microBatchSize: 1, globalBatchSize: 1, offload: CPU}
"""
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip


def test_what_is_offloaded_from_a_gpu_with_the_machine_s_memory_stays_in_it() -> None:
    """8.03 billion parameters: 96 GB of masters and moments, and as much again for a save's copy, are no gain of memory there."""
    outcomes = {}
    for shared in (False, True):
        host = facts("lab0", "10.0.0.1", gpu(0, memory=128_000_000_000, shared=shared), memory=128_000_000_000)
        told = HostsAsked({"lab0": host}, (), tuple(placed(host, job=JOB)))
        found = forecast(told.seats[0].resolved, RunFacts(shape=shape_from_config(LLAMA), cards=cards_of(told)))
        outcomes[shared] = {one.outcome.value for one in found.findings if one.subject == "memory"} & {"ok", "refused"}
        assert ("FP32 masters and moments" in found.figures["memoryItems"]) is shared
    assert outcomes == {False: {"ok"}, True: {"refused"}}


@pytest.mark.parametrize(("script", "told"), [("echo 572.16; echo 572.16", GpuFacts(2, "572.16")), ("exit 9", GpuFacts(0, ""))])
def test_gpus_of_wsl_are_counted_by_nvidia_smi(tmp_path: Path, script: str, told: GpuFacts) -> None:
    for name, text in {"dev/dxg": "", "usr/lib/wsl/lib/nvidia-smi": f"#!/bin/sh\n{script}\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "usr/lib/wsl/lib/nvidia-smi").chmod(0o755)
    assert gpu_facts(tmp_path) == told


def test_of_two_ranks_on_gpus_with_the_machine_s_memory_each_has_half() -> None:
    host = replace(
        facts("lab0", "10.0.0.1", gpu(0, memory=128 << 30, shared=True), gpu(1, memory=128 << 30, shared=True)), memory=128 << 30
    )
    told = HostsAsked(
        {"lab0": host},
        (),
        tuple(placed(host, job=JOB.replace("gpusPerNode: 1", "gpusPerNode: 2").replace("BatchSize: 1}", "BatchSize: 2}"))),
    )
    assert [card.bytes for card in cards_of(told)] == [64 << 30]
