"""The plan of a job on hosts: what a start would find, whose card is too small, and how unlike cards share the work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.api.files.jobfile import parse_job_file
from lockstep.plan.ahead.forecast import Card, RunFacts, forecast, slow_network
from lockstep.plan.ahead.slownetwork import NetworkSpeed
from lockstep.plan.cluster.finding import Outcome
from lockstep.plan.hosts.condition import HostLook
from lockstep.plan.hosts.facts import HostFacts
from lockstep.plan.hosts.fit import job_findings
from lockstep.plan.hosts.place import inputs_of
from lockstep.plan.hosts.planned import HostsAsked, cards_of, hosts_plan, with_hosts
from lockstep_spec.choices import Balance
from lockstep_spec.families import shape_from_config
from support.hosts_told import CLUSTER, facts, gpu, placed

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
TRAINING = """
apiVersion: lockstep.dev/v1alpha1
kind: TrainingJob
metadata: {name: x}
spec:
  nodes: 2
  gpusPerNode: 1
  training:
    model: {name: /workspace/models/m}
    data: {path: /datasets/d.jsonl, maxLength: 128}
    optimization: {microBatchSize: 2, globalBatchSize: 8%s}
"""


def asked(*hosts: HostFacts, job: str) -> HostsAsked:
    return HostsAsked({one.name: one for one in hosts}, (), tuple(placed(*hosts, job=job)))


LARGE = facts("lab0", "10.0.0.1", gpu(0))
SMALL = facts("lab1", "10.0.0.2", replace(gpu(0), name="NVIDIA GeForce RTX 3070 Ti", memory=8 << 30))


def test_the_card_that_does_not_fit_is_named_with_its_host_and_what_it_needs() -> None:
    told = asked(LARGE, SMALL, job=TRAINING % "")
    known = RunFacts(shape=shape_from_config(LLAMA), cards=cards_of(told))
    estimate = forecast(told.seats[0].resolved, known)
    findings = hosts_plan(told.seats[0].resolved, ["lab0", "lab1"], told, estimate)
    refused = [one for one in findings if one.outcome is Outcome.REFUSED]
    assert [one.message.partition(" needs about ")[0] for one in refused] == ["lab1's NVIDIA GeForce RTX 3070 Ti (8.6 GB)"]
    assert next(one.message for one in findings if one.subject == "memory" and one.outcome is Outcome.OK).startswith(
        "lab0's H100 (85.9 GB) needs about"
    )
    text = " ".join(one.message for one in findings)
    assert not any(word in text for word in ("namespace", "image", "quota", "cluster's gpus.type", "pod")), text


def test_a_start_that_would_be_refused_is_a_refusal_of_the_plan() -> None:
    told = HostsAsked({}, ("host lab1 can't be reached: no route",))
    resolved = placed(LARGE, SMALL, job=TRAINING % "")[0].resolved
    findings = hosts_plan(resolved, ["lab0", "lab1"], told, forecast(resolved, RunFacts()))
    assert [one.message for one in findings if one.outcome is Outcome.REFUSED] == ["host lab1 can't be reached: no route"]


@pytest.mark.parametrize(
    ("hosts", "stated", "balance"),
    [
        ((LARGE, SMALL), "", Balance.MEASURED),
        ((LARGE, SMALL), ", balance: Equal", Balance.EQUAL),
        ((LARGE, SMALL), ", batches: Rows", Balance.EQUAL),
        ((LARGE, replace(SMALL, gpus=(gpu(0),))), "", Balance.EQUAL),
    ],
)
def test_unlike_cards_share_by_measure_unless_the_job_says_otherwise(hosts: tuple[HostFacts, ...], stated: str, balance: Balance) -> None:
    seats = placed(*hosts, job=TRAINING % stated)
    assert {str(seat.run.training["optimization"]["balance"]) for seat in seats if seat.run.training} == {balance.value}
    assert {seat.record.job["spec"]["training"]["optimization"].get("balance", "Equal") for seat in seats} == {balance.value}


@pytest.mark.parametrize(
    ("gpus", "stated", "batch", "idle"),
    [
        ((8, 2), "", 10, ""),
        ((8, 2), "", 9, "1 of 10 have nothing to do"),
        ((2, 2), ", micro_batch: 4", 10, ""),
        ((2, 2), ", micro_batch: 4", 3, "1 of 4 have nothing to do"),
    ],
)
def test_a_plan_and_a_check_count_idle_ranks_by_the_gpus_and_samples_of_each_host(
    gpus: tuple[int, int], stated: str, batch: int, idle: str
) -> None:
    file = parse_cluster_file(
        "cluster: {name: lab, platform: hosts}\ndefaults: {python: ~/env/bin/python}\nhosts:\n"
        f"  - {{name: lab0, address: 10.0.0.1}}\n  - {{name: lab1, address: 10.0.0.2{stated}}}\n",
        "lab.yaml",
    )
    micro = "microBatchSize: 1, globalBatchSize: "
    text = (TRAINING % "").replace("  gpusPerNode: 1\n", "").replace("microBatchSize: 2, globalBatchSize: 8", f"{micro}{batch}")
    hosts = [facts(f"lab{node}", f"10.0.0.{node + 1}", *map(gpu, range(count))) for node, count in enumerate(gpus)]
    told = HostsAsked({one.name: one for one in hosts}, (), tuple(placed(*hosts, job=text, file=file)))
    planned = forecast(told.seats[0].resolved, with_hosts(RunFacts(), told)).findings
    looks = [HostLook(file.hosts.host(one.name), one) for one in hosts]
    checked = job_findings(parse_job_file(text, "job.yaml"), file.profile, file.hosts, looks, None, RunFacts(), "")
    for findings in (planned, checked):
        said = [one.message for one in findings if one.subject == "ranks"]
        assert len(said) == bool(idle) and all(idle in words for words in said)


def test_a_check_judges_ranks_on_cpus_by_the_jobs_own_memory_as_a_plan_does() -> None:
    text = (TRAINING % "").replace("gpusPerNode: 1", "gpusPerNode: 0\n  resources: {memory: 1Gi}")
    told = {"memory": 64 << 30, "controllers": frozenset({"cpu", "memory"})}
    hosts = [facts("lab0", "10.0.0.1", **told), facts("lab1", "10.0.0.2", **told)]
    looks = [HostLook(CLUSTER.hosts.host(one.name), one) for one in hosts]
    known = RunFacts(shape=shape_from_config(LLAMA))
    found = job_findings(parse_job_file(text, "job.yaml"), CLUSTER.profile, CLUSTER.hosts, looks, None, known, "")
    failed = [one.message for one in found if one.outcome is Outcome.FAILED and one.subject == "memory"]
    assert [words.partition(" needs about ")[0] for words in failed] == [f"lab{node}'s memory (1.1 GB)" for node in (0, 1)]


def test_a_model_below_a_home_is_looked_for_before_the_start() -> None:
    entries = inputs_of(parse_job_file(TRAINING % "", "job.yaml"), CLUSTER.profile, CLUSTER.hosts.host("lab0"))
    assert ["spec.training.model.name", "~/lockstep/workspace/models/m", "folder"] in entries
    assert ["spec.training.model.name", "/data/ws/models/m", "folder"] in inputs_of(
        parse_job_file(TRAINING % "", "j"), CLUSTER.profile, CLUSTER.hosts.host("lab1")
    )


def test_a_stated_micro_batch_counts_in_the_plan_of_its_card() -> None:
    resolved = placed(LARGE, SMALL, job=TRAINING % "")[0].resolved
    shape = shape_from_config(LLAMA)
    needs = {}
    for micro in (1, 64):
        estimate = forecast(resolved, RunFacts(shape=shape, cards=(Card("a", 10**12, micro),)))
        needs[micro] = next(one.message for one in estimate.findings if one.subject == "memory" and one.outcome is Outcome.OK)
    assert needs[1] != needs[64]


@pytest.mark.parametrize(("stage", "slow"), [("Stage1", False), ("Stage3", True)])
def test_only_a_run_that_moves_weights_is_too_slow_for_a_lan(stage: str, slow: bool) -> None:
    job = (TRAINING % "").replace("    model:", f"    zeroStage: {stage}\n    model:")
    resolved = placed(LARGE, SMALL, job=job)[0].resolved
    reason, help_ = slow_network(resolved, RunFacts(shape=shape_from_config(LLAMA), speed=NetworkSpeed(0.9, "measured")))
    assert bool(reason) == bool(help_) == slow
    assert not slow or "too slow for Stage3" in reason
