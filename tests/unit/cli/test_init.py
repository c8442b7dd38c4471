"""What `lockstep init` writes can be used as it is, and never over something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import ConfigError
from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.api.files.jobfile import parse_job_file
from lockstep.cli.clusters import init
from lockstep.cli.shared.jobargs import TargetOptions
from lockstep.plan.hosts.facts import HostFacts
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults
from lockstep.platforms.hosts.fleet import Fleet
from support.hosts_told import facts, gpu


def test_a_cluster_file_has_its_name_and_every_key_of_the_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init.cluster("mine", tmp_path / "mine.yaml")
    found = parse_cluster_file((tmp_path / "mine.yaml").read_text(), "mine.yaml")
    assert (found.cluster.name, found.profile.metadata.name) == ("mine", "mine")
    assert f"Wrote {tmp_path / 'mine.yaml'}" in capsys.readouterr().out


@pytest.mark.parametrize("script", [False, True])
def test_a_job_file_is_valid_as_it_is_written(tmp_path: Path, script: bool) -> None:
    path = tmp_path / "lora.yaml"
    init.job(TargetOptions("barcelona"), "lora", script, path)
    text = path.read_text()
    job = parse_job_file(text, "lora.yaml")
    assert (job.metadata.name, job.spec.cluster, job.spec.script is not None) == ("lora", "barcelona", script)
    assert f"-f {path}" in text and "NAME" not in text and "CLUSTER" not in text
    profile = TrainingCluster.model_validate({"metadata": {"name": "barcelona"}, "spec": {"image": "i"}})
    warned = [one.reason for one in resolve(job, profile, PlatformDefaults(namespace="x")).warnings]
    assert warned == ([] if script else ["Placeholder"]), "of the model, which nobody can know"


def test_a_job_for_a_cluster_that_is_given_by_its_file_names_that_cluster(tmp_path: Path) -> None:
    lab = tmp_path / "my lab.yaml"
    lab.write_text("cluster: {name: lab, platform: hosts}\nhosts: [{name: a}, {name: b}]\n")
    init.job(TargetOptions(str(lab)), "x", output=tmp_path / "x.yaml")
    assert parse_job_file((tmp_path / "x.yaml").read_text(), "x.yaml").spec.cluster == "lab"


def test_a_file_is_printed_alone_if_it_is_to_go_to_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    init.job(TargetOptions("local"), "x", output=Path("-"))
    told = capsys.readouterr()
    assert parse_job_file(told.out, "printed").metadata.name == "x" and "-f x.yaml" in told.out
    assert told.err == "Next: edit it, then lockstep validate -f x.yaml, and lockstep run -f x.yaml\n"
    init.cluster("mine", Path("-"))
    assert parse_cluster_file(capsys.readouterr().out, "printed").cluster.name == "mine"
    assert list(tmp_path.iterdir()) == []


def test_a_script_comes_with_its_settings(tmp_path: Path) -> None:
    init.script(tmp_path / "workspace")
    assert sorted(path.name for path in (tmp_path / "workspace").iterdir()) == ["ds_config.json", "train_multi_node.py"]


def test_nothing_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="already exists"):
        init.script(tmp_path)
    with pytest.raises(ConfigError, match="already exists"):
        init.job(TargetOptions("local"), "x", False, path)
    assert (path.read_text(), [p.name for p in tmp_path.iterdir()]) == ("mine", ["ds_config.json"])


@pytest.mark.parametrize("name", ["Not_A_Name", "a/b", "x" * 80])
def test_a_name_that_can_not_be_leaves_no_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        init.job(TargetOptions("local"), name, False, tmp_path / "x.yaml")
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_becomes_a_job_of_the_cluster_s_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, path = tmp_path / "config.yaml", tmp_path / "x.yaml"
    config.write_text("model_name_or_path: org/m\ntrain_file: /datasets/a.jsonl\nper_device_train_batch_size: 1\nneftune_noise_alpha: 5\n")
    lab = tmp_path / "lab.yaml"
    lab.write_text("cluster: {name: lab, platform: hosts}\nhosts: [{name: a, gpus: 2}, {name: b, gpus: 2}, {name: c, gpus: 3}]\n")
    init.job(TargetOptions(str(lab)), "x", output=path, origin=config)
    job = parse_job_file(path.read_text(), "x.yaml")
    assert (job.spec.cluster, job.spec.nodes, job.spec.training.optimization.global_batch_size) == ("lab", None, 7)
    output = capsys.readouterr().out.splitlines()
    assert output[0] == f"Wrote {path}"
    assert output[2] == f"  {config}:4: neftune_noise_alpha: 5: the result may differ: nothing like it is in the loss"
    init.job(TargetOptions(str(lab)), "x", output=tmp_path / "y.yaml", origin=config, nodes=2, gpus=1)
    job = parse_job_file((tmp_path / "y.yaml").read_text(), "y.yaml")
    assert (job.spec.nodes, job.spec.gpus_per_node) == (2, 1)


@pytest.mark.parametrize(
    ("cards", "problems", "batch", "words"),
    [
        ({"a": 8, "b": 8}, {}, 32, ""),
        ({"a": 8, "b": 4}, {}, 24, ""),
        ({"a": 0, "b": 0}, {}, 4, ""),
        ({"a": 8}, {"b": "host b can't be reached"}, None, "host b can't be reached"),
    ],
)
def test_hosts_that_state_no_gpus_are_asked_for_them_and_the_batch_is_that_of_all(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    cards: dict[str, int],
    problems: dict[str, str],
    batch: int | None,
    words: str,
) -> None:
    async def look(fleet: Fleet, names: list[str]) -> tuple[dict[str, HostFacts], dict[str, str]]:
        return {name: facts(name, "10.0.0.1", *map(gpu, range(cards[name]))) for name in names if name in cards}, dict(problems)

    monkeypatch.setattr(Fleet, "look", look)
    config, path, pair = tmp_path / "config.yaml", tmp_path / "x.yaml", tmp_path / "pair.yaml"
    config.write_text(
        "name_or_path: org/m\ntrain_file: /datasets/a.jsonl\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 2\n"
    )
    pair.write_text("cluster: {name: pair, platform: hosts}\nhosts: [{name: a}, {name: b}]\n")
    init.job(TargetOptions(str(pair)), "x", output=path, origin=config, nodes=2)
    job = parse_job_file(path.read_text(), "x.yaml")
    assert (job.spec.nodes, job.spec.gpus_per_node, job.spec.training.optimization.global_batch_size) == (2, None, batch)
    told = capsys.readouterr()
    assert words in told.err and bool(words) == ("state optimization.globalBatchSize as 1 × 2 × the ranks" in told.out)


def test_layers_that_peft_would_move_are_warned_of_where_the_model_is_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, model = tmp_path / "config.yaml", tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3_next"}')
    stated = f"model_name_or_path: {model}\ntrain_file: /datasets/a.jsonl\nlora_target_modules: [q_proj, up_proj]\n"
    config.write_text(stated)
    init.job(TargetOptions("local"), "x", output=tmp_path / "x.yaml", origin=config)
    assert (
        "warning: training.lora.targetModules: with a model of type qwen3_next, peft puts the adapter of up_proj on"
        in capsys.readouterr().out
    )
    config.write_text(stated.replace(", up_proj", ""))
    init.job(TargetOptions("local"), "x", output=tmp_path / "y.yaml", origin=config)
    assert "warning" not in capsys.readouterr().out


def test_options_of_a_configuration_go_with_it_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--nodes and --gpus-per-node need --from"):
        init.job(TargetOptions("local"), "x", output=tmp_path / "x.yaml", nodes=2)
    with pytest.raises(ConfigError, match="--script is for a program of your own"):
        init.job(TargetOptions("local"), "x", script=True, output=tmp_path / "x.yaml", origin=tmp_path / "c.yaml")
    assert list(tmp_path.iterdir()) == []
