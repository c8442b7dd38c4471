"""`lockstep render` and `validate` as people type them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from golden.plan_cases import CHECKOUT, HOSTILE
from lockstep.api.errors import ConfigError
from lockstep.cli.jobs.render import ObjectForm, render, validate
from lockstep.cli.shared.inputs import read_inputs
from lockstep.cli.shared.jobargs import TargetOptions
from lockstep.plan.render.resolved import MADE_BY_OPERATOR

TRAINING = {"model": {"name": "/workspace/m"}, "data": {"path": "/datasets/d.jsonl"}}
SAMPLES = CHECKOUT / "manifests" / "samples"


def job_file(folder: Path, **spec: Any) -> Path:
    document = {
        "apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x"},
            "spec": {"script": {"path": "a.py"}} | spec,
    }  # fmt: skip
    path = folder / "job.yaml"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


@pytest.mark.parametrize("sample", sorted(SAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_sample_is_valid_on_the_cluster_that_it_names(sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validate(TargetOptions(), [sample])
    assert capsys.readouterr().out == "ok\n"


def test_a_job_that_cannot_run_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the cluster local has no RDMA"):
        validate(TargetOptions("local"), job_file(tmp_path, fabric={"mode": "RDMA"}))


def test_rendered_yaml_and_json_hold_the_same_objects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = job_file(tmp_path)
    render(TargetOptions("local"), path)
    as_yaml = list(yaml.safe_load_all(capsys.readouterr().out))
    render(TargetOptions("local"), path, output=ObjectForm.JSON)
    assert json.loads(capsys.readouterr().out)["items"] == as_yaml


def test_a_rendered_secret_shows_its_placeholder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    render(TargetOptions("local"), job_file(tmp_path))
    (secret,) = [item for item in yaml.safe_load_all(capsys.readouterr().out) if item["kind"] == "Secret"]
    assert secret["stringData"] == {"key": MADE_BY_OPERATOR}
    assert "data" not in secret


def test_explain_prints_one_line_a_value_with_its_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    render(TargetOptions("local"), job_file(tmp_path, nodes=1), explain=True)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["FIELD", "VALUE", "LAYER"] in lines
    assert ["nodes", "1", "job"] in lines
    assert ["gpusPerNode", "0", "cluster"] in lines
    assert ["restart.maxRestarts", "3", "default"] in lines


def test_explain_as_json_keeps_every_value_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    render(TargetOptions("local"), job_file(tmp_path, script={"path": "a.py", "args": HOSTILE}), explain=True, output=ObjectForm.JSON)
    rows = {row["field"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert rows["script.args"] == HOSTILE


def test_explain_shows_brackets_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    render(TargetOptions("local"), job_file(tmp_path, script={"path": "[red]a.py[/red]"}), explain=True)
    assert "[red]a.py[/red]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stated", "option", "expected"), [(None, None, "lockstep"), ("mine", None, "mine"), (None, "there", "there"), ("mine", "mine", "mine")]
)
def test_the_namespace_is_the_options_else_the_jobs_else_the_clusters(
    tmp_path: Path, stated: str | None, option: str | None, expected: str
) -> None:
    path = job_file(tmp_path)
    if stated:
        path.write_text(path.read_text().replace('"name": "x"', f'"name": "x", "namespace": "{stated}"'), encoding="utf-8")
    assert read_inputs(path, TargetOptions("local", option)).namespace == expected


def test_two_different_namespaces_are_an_error(tmp_path: Path) -> None:
    path = job_file(tmp_path)
    path.write_text(path.read_text().replace('"name": "x"', '"name": "x", "namespace": "mine"'), encoding="utf-8")
    with pytest.raises(ConfigError, match="metadata.namespace is mine, but --namespace is there"):  # noqa: RUF043
        read_inputs(path, TargetOptions("local", "there"))


def test_a_job_that_names_no_cluster_needs_the_option(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"cluster is not set, and none is in use .*: set it or use --cluster; there is barcelona, local",
    ):
        read_inputs(job_file(tmp_path), TargetOptions())


def test_a_cluster_file_may_lie_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (CHECKOUT / "clusters" / "local.yaml").read_text(encoding="utf-8")
    (tmp_path / "home.yaml").write_text(text.replace("name: local", "name: home"), encoding="utf-8")
    path = job_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert read_inputs(path, TargetOptions("home.yaml")).cluster.cluster.name == "home"


def test_another_profile_than_the_jobs_own_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hosts have no operator that would take the other one."""
    named = job_file(tmp_path, cluster="barcelona")
    read_inputs(named, TargetOptions("local"))
    assert "job.yaml names the cluster barcelona, and local is used here: an operator takes barcelona" in capsys.readouterr().err
    hosts = tmp_path / "lab.yaml"
    hosts.write_text((CHECKOUT / "clusters/template-hosts.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    read_inputs(named, TargetOptions(str(hosts)))
    assert "OtherCluster" not in capsys.readouterr().err


def test_rendering_imports_no_client_of_a_cluster(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from lockstep.cli.jobs.render import TargetOptions, render;"
        f" render(TargetOptions('local'), Path({str(job_file(tmp_path))!r}))"
    )
    shown = f"{code}; sys.exit('kubernetes' in sys.modules or 'kopf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", shown], capture_output=True, check=False).returncode == 0


def test_a_job_file_may_be_piped_in(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lockstep.cli.main", "validate", "-f", "-", "--cluster", "local"]
    done = subprocess.run(command, input=job_file(tmp_path).read_text(), capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("ok\n", 0), done.stderr


def test_gpus_on_a_cluster_without_any_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gpusPerNode is 4, but the cluster local has no GPUs"):
        validate(TargetOptions("local"), job_file(tmp_path, gpusPerNode=4))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"image": "ml-dev-env:pytorch-2.9-numpy2"},
            "note: job.yaml: image: nothing says that ml-dev-env:pytorch-2.9-numpy2 has Lockstep's trainer"),
        ({"image": "ml-dev-env:1", "training": None, "script": {"path": "a.py"}}, ""),
        ({"image": "team/lockstep-trainer:1"}, ""),
        ({"image": "team/lockstep-trainer:1", "training": TRAINING | {"optimization": {"globalBatchSize": 4}}},
            "warning: IdleRanks: a step's 4 samples are not"),
    ],
    ids=["a training job", "a script", "the trainer", "too few samples"],
)  # fmt: skip
def test_validate_says_of_a_training_job_that_its_image_may_lack_the_trainer_or_that_ranks_have_nothing_to_do(
    spec: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    job = {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x"}}
    Path("job.yaml").write_text(json.dumps(job | {"spec": {"cluster": "barcelona", "nodes": 2, "training": TRAINING} | spec}))
    validate(TargetOptions(), [Path("job.yaml")])
    printed = capsys.readouterr()
    assert printed.out == "ok\n"
    assert printed.err.startswith(said) if said else printed.err == ""
