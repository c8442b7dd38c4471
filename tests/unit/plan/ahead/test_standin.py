"""Plans without a cluster: which GPUs `--on` means, and what stands in for a cluster file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from golden.plan_cases import job
from lockstep.api.errors import ConfigError
from lockstep.cli.shared.inputs import Inputs, resolve_inputs
from lockstep.plan.ahead.forecast import Forecast, capacity
from lockstep.plan.ahead.planned import all_findings
from lockstep.plan.ahead.standin import parse_hardware, stand_in
from lockstep.plan.render.resolve import refuse_missing_gpus
from lockstep.plan.render.resolved import Resolved
from lockstep_spec.choices import Precision
from lockstep_spec.gpus import GPUS


def resolved(on: str | None = None, **spec: Any) -> Resolved:
    stated = job(**spec)
    return resolve_inputs(Inputs(stated, stand_in(stated, None if on is None else parse_hardware(on)), "default"))


@pytest.mark.parametrize(
    ("word", "means"),
    [
        ("2x4xH100", (2, 4, "H100", 80)),
        ("2x4xH100-80GB", (2, 4, "H100", 80)),
        ("1x8xNVIDIA H100 80GB HBM3", (1, 8, "H100", 80)),
        ("2x4xa100-40gb", (2, 4, "A100", 40)),
        ("2x4xNVIDIA-A100-SXM4-40GB", (2, 4, "A100", 40)),
        ("2x4xA100", (2, 4, "A100", 80)),
        ("1x1x4090", (1, 1, "RTX 4090", 24)),
        ("1X2XNVIDIA GeForce RTX 3090", (1, 2, "RTX 3090", 24)),
        ("1x4xrtx-6000-ada", (1, 4, "RTX 6000 Ada", 47)),
        ("1x4xl40s", (1, 4, "L40S", 47)),
        ("1x4xNVIDIA L40S 48GB", (1, 4, "L40S", 47)),
        ("2x8xNVIDIA-A100-PCIE-40GB", (2, 8, "A100", 40)),
        ("2x4xa100-40", (2, 4, "A100", 40)),
        ("2x4xA100-80", (2, 4, "A100", 80)),
        ("1x2xNVIDIA RTX PRO 6000 Blackwell Server Edition", (1, 2, "RTX PRO 6000", 96)),
        ("1x2xRTX PRO 6000 Blackwell", (1, 2, "RTX PRO 6000", 96)),
        ("1x8xNVIDIA H100 PCIe", (1, 8, "H100 PCIe", 80)),
        ("1x2xRTX 4090-24", (1, 2, "RTX 4090", 24)),
        ("1x8xh100 pcie", (1, 8, "H100 PCIe", 80)),
        ("16x8xV100-16G", (16, 8, "V100", 16)),
    ],
)
def test_cards_are_known_as_people_write_them(word: str, means: tuple[int, int, str, int]) -> None:
    assert parse_hardware(word)[1:] == means


@pytest.mark.parametrize("card", [name for name, gpu in GPUS.items() if gpu.gigabytes])
def test_every_card_of_the_list_has_the_memory_that_a_plan_by_its_name_has(card: str) -> None:
    given = resolved(f"1x1x{card}", gpusPerNode=1)
    assert capacity(given, ())[0] == GPUS[card].gigabytes[0] * 10**9


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("2x4", "must be NODESxGPUSxCARD, for example 2x4xH100"),
        ("0x4xH100", "must be NODESxGPUSxCARD"),
        ("2x0xH100", "must be NODESxGPUSxCARD"),
        ("2x4xH1000", "no card H1000; did you mean H100"),
        ("2x4xRTX 4091", "no card RTX 4091; did you mean RTX 4090"),
        ("2x4xMI300X", "memory isn't planned for MI300X; it is for GB200, B200"),
        ("2x4xquux", "no card quux; it has GB200, B200"),
        ("2x4xA100-60", "no A100 with 60 GB; it has 80 or 40 GB"),
        ("2x4xA100-60GB", "no A100 with 60 GB; it has 80 or 40 GB"),
    ],
)
def test_what_is_no_card_is_refused_in_one_sentence(word: str, says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_hardware(word)
    (sentence,) = refusal.value.args
    assert sentence.startswith(f"--on {word}: ") and says in sentence


def test_the_size_that_counts_is_said_with_those_that_there_are() -> None:
    assert capacity(resolved("1x1xA100"), ()) == (80 * 10**9, "--on: A100 with 80 GB, some have 40")
    assert capacity(resolved("1x1xH100"), ()) == (80 * 10**9, "--on: H100 with 80 GB")


def test_nodes_and_gpus_are_those_of_on_where_the_job_states_none() -> None:
    given = resolved("3x4xH100", nodes=None)
    assert (given.nodes, given.gpus_per_node) == (3, 4)
    assert list(parse_hardware("3x4xH100").refusals(given)) == []


def test_a_job_that_wants_more_is_refused_and_one_that_wants_less_is_not() -> None:
    found = list(parse_hardware("1x4xH100").refusals(resolved("1x4xH100", nodes=2, gpusPerNode=8)))
    assert [(one.message, one.fix) for one in found] == [
        ("the job's nodes is 2, and --on 1x4xH100 has 1", "--set nodes=1, or a larger --on"),
        ("the job's gpusPerNode is 8, and --on 1x4xH100 has 4", "--set gpusPerNode=4, or a larger --on"),
    ]
    assert list(parse_hardware("4x8xH100").refusals(resolved("4x8xH100", nodes=2, gpusPerNode=2))) == []


@pytest.mark.parametrize(
    "spec", [{"gpusPerNode": 8}, {"gpusPerNode": 0}, {"fabric": {"mode": "RDMA"}}, {"storage": {"workspaceClaimName": "mine"}},
        {"storage": {"mode": "PerPod"}}]
)  # fmt: skip
def test_without_a_cluster_nothing_that_only_a_cluster_could_lack_is_refused(
    spec: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    refuse_missing_gpus(resolved(**spec))
    assert capsys.readouterr().err == ""


def test_a_job_that_demands_rdma_is_not_refused_either() -> None:
    assert resolved(fabric={"mode": "RDMA"}).transport.value == "RDMA"


@pytest.mark.parametrize(
    ("card", "precision", "warned"), [("V100", "BF16", True), ("T4", "BF16", True), ("V100", "FP16", False), ("A100", "BF16", False)]
)
def test_a_job_in_bf16_on_cards_without_it_is_warned_of(card: str, precision: str, warned: bool) -> None:
    given = resolved(f"2x4x{card}", gpusPerNode=4)
    training = given.training.model_copy(update={"precision": Precision(precision)})
    found = all_findings(replace(given, training=training), {}, None, None, Forecast())
    assert [one.fix for one in found if one.subject == "precision"] == ["--set training.precision=FP16"] * warned
