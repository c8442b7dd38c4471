"""The README's job file in an empty folder: it is checked, planned and rendered without a cluster."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lockstep.api.errors import ConfigError
from lockstep.api.files.jobfile import parse_job_file
from lockstep.cli.main import app
from support.checkout import ROOT

NOTE = "note: job.yaml names no cluster, and none is in use: it is checked without one (--cluster names one)\n"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the README's job file alone; no cluster was deployed from here, and no hub can be asked."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^## A job file\n\n```yaml\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    (tmp_path / "job.yaml").write_text(block[1], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCKSTEP_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def typed(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def test_the_readmes_job_is_valid() -> None:
    done = typed("validate", "job.yaml")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "ok\n", NOTE)


def test_the_readmes_job_is_planned_for_named_gpus() -> None:
    done = typed("plan", "-f", "job.yaml", "--on", "2x4xH100")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "llama-lora without a cluster: 2 nodes with 4 GPUs (H100 with 80 GB) each" in done.stdout
    assert re.search(r"^ok       memory     a GPU needs about [\d.]+ GB of 80.0 GB \(--on: H100 with 80 GB\)$", done.stdout, re.MULTILINE)
    assert "8,030,261,248 (built-in sizes of meta-llama/Llama-3.1-8B)" in done.stdout
    assert (
        done.stdout.splitlines()[-1]
        == "fits as far as can be seen; not known: cluster (--cluster NAME), steps (--samples N or --samples FILE)"
    )
    assert done.stdout.count("no cluster is named") == 1


def test_a_plan_counts_the_samples_of_a_file(empty_folder: Path) -> None:
    (empty_folder / "d.jsonl").write_text('{"text": "a"}\n' * 1000)
    done = typed("plan", "job.yaml", "--on", "2x4xH100", "--samples", "d.jsonl", "--tokens-per-second", "20000", "-o", "json")
    plan = json.loads(done.stdout)
    assert (plan["verdict"], plan["figures"]["samples"], plan["figures"]["memoryCapacityBytes"]) == (
        "fits as far as can be seen", 1000, 80 * 10**9,
    )  # fmt: skip


@pytest.mark.parametrize(("on", "code", "last"),
    [("2x1xV100-16GB", 1, "refused: training needs about"), ("1x4xH100", 1, "refused: the job's nodes is 2"),
        ("2x1xRTX 4090", 4, "may fail once it runs: a GPU needs")])  # fmt: skip
def test_what_does_not_fit_ends_as_a_plan_by_files_does(on: str, code: int, last: str) -> None:
    done = typed("plan", "job.yaml", "--on", on)
    assert (done.exit_code, done.stdout.splitlines()[-1].startswith(last)) == (code, True), done.stdout


def test_on_counts_instead_of_the_jobs_cluster() -> None:
    done = typed("plan", "job.yaml", "--on", "2x4xH100", "--set", "cluster=nowhere")
    assert (done.exit_code, done.stderr) == (0, "")


@pytest.mark.parametrize("option", ["--cluster", "--context"])
def test_on_and_a_cluster_exclude_each_other(option: str) -> None:
    done = typed("plan", "job.yaml", "--on", "2x4xH100", option, "x")
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception) == f"--on and {option} both say where the job would run: give one of them"


def test_a_plan_without_a_cluster_and_without_gpus_says_what_to_type() -> None:
    done = typed("plan", "job.yaml")
    assert (done.exit_code, done.stderr) == (4, NOTE)
    assert "without a cluster, and one GPU a node, as nothing states more: 2 nodes with 1 GPU each" in done.stdout
    assert "memory (--on NODESxGPUSxCARD, such as --on 2x4xH100)" in done.stdout.splitlines()[-1]


def test_the_job_is_rendered_and_its_namespace_is_left_to_kubectl() -> None:
    done = typed("render", "job.yaml", "-o", "json")
    assert (done.exit_code, done.stderr) == (0, NOTE)
    assert {"StatefulSet", "Service"} <= {item["kind"] for item in json.loads(done.stdout)["items"]}
    assert "namespace" not in typed("render", "job.yaml", "-o", "job").stdout
    assert "namespace: mine" in typed("render", "job.yaml", "-o", "job", "-n", "mine").stdout


def test_a_new_job_names_no_cluster_and_is_valid(empty_folder: Path) -> None:
    for words in (["init", "job", "new"], ["init", "job", "own", "--script"]):
        assert typed(*words).exit_code == 0
        file = f"{words[2]}.yaml"
        assert parse_job_file((empty_folder / file).read_text(), file).spec.cluster is None
        assert typed("validate", file).exit_code == 0


def test_a_job_from_a_configuration_names_no_cluster(empty_folder: Path) -> None:
    (empty_folder / "config.yaml").write_text("model_name_or_path: Qwen/Qwen3-8B\ntrain_file: /datasets/a.jsonl\n")
    done = typed("init", "job", "taken", "--from", "config.yaml")
    assert done.exit_code == 0, done.exception
    assert parse_job_file((empty_folder / "taken.yaml").read_text(), "taken.yaml").spec.cluster is None


def test_verbs_that_send_still_want_a_cluster() -> None:
    done = typed("run", "-f", "job.yaml", "--in-namespace")
    assert isinstance(done.exception, ConfigError)
    assert "spec.cluster is not set, and none is in use (lockstep use)" in str(done.exception)
