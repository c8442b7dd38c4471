"""The cluster files and samples that ship load as they stand, and fit to each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lockstep.api.cluster import TrainingClusterSpec
from lockstep.api.files.clusterfile import ClusterFile
from lockstep.api.files.clusterkeys import KEYS
from lockstep.api.files.jobfile import parse_job_file
from lockstep.api.training import Training
from lockstep.cli.main import app
from lockstep.cli.shared.clusterfiles import cluster_names, load_cluster
from lockstep.plan.render.objects import render
from lockstep.plan.render.resolve import Transport, resolve, why_unknown
from lockstep.plan.render.resolved import PlatformDefaults, Refused
from lockstep_spec.choices import StorageMode
from support.checkout import ROOT

CLUSTERS = ROOT / "clusters"
SAMPLES = sorted((ROOT / "manifests/samples").glob("*.yaml"))

MADE = PlatformDefaults(image="lockstep-trainer:0.1.0")
"""What the operator adds."""


def cluster(name: str) -> ClusterFile:
    return load_cluster(name)


def test_the_clusters_that_ship() -> None:
    assert cluster_names() == ["barcelona", "local", "nerc-production"]


@pytest.mark.parametrize("name", cluster_names())
def test_a_cluster_that_ships_loads(name: str) -> None:
    assert cluster(name).profile.spec != TrainingClusterSpec()


def test_barcelona_has_rdma_and_a_volume_for_every_pod() -> None:
    found = cluster("barcelona").profile.spec
    assert (found.network.rdma.enabled, found.storage.mode) == (True, StorageMode.PER_POD)
    assert [rail.resource for rail in found.network.rdma.rails] == [f"openshift.io/eno{n}np0rdma" for n in (5, 6, 7, 8)]


def test_nerc_production_has_tcp_and_one_shared_volume() -> None:
    found = cluster("nerc-production").profile.spec
    assert (found.network.rdma.enabled, found.storage.mode, found.nodes.gpu_nodes) == (False, StorageMode.SHARED, [])


def test_the_template_has_every_key() -> None:
    text = (CLUSTERS / "template.yaml").read_text()
    load_cluster(str(CLUSTERS / "template.yaml"))
    names = {part.removesuffix("[]") for key in KEYS for part in key.split(".")}
    assert [name for name in sorted(names) if f"{name}:" not in text] == []


def test_a_file_that_ships_has_no_figure_that_reads_as_measured() -> None:
    """Whoever copies one would have it as if measured there: section calibration, the threshold derived from it, and GB/s in a comment."""
    for path in CLUSTERS.glob("*.yaml"):
        found, text = load_cluster(str(path)), path.read_text()
        assert found.calibration == () and found.profile.spec.network.minimum_busbw is None, path.name
        assert re.findall(r"[\d.]+ ?(?:GB/s|MB/s|TFLOPS|tokens/s)|\d{4}-\d\d-\d\d", text) == [], path.name


@pytest.mark.parametrize("name", cluster_names())
def test_a_cluster_that_ships_names_an_image_with_the_trainer_or_none(name: str) -> None:
    """None: what `lockstep build trainer` makes, from the operator's registry. An image that nothing here builds takes eight GPUs and ends
    at once.
    """
    spec = cluster(name).profile.spec
    assert spec.image is None or why_unknown(spec.image, *spec.pod.env) == ""


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_validates_as_it_stands(path: Path) -> None:
    done = CliRunner().invoke(app, ["validate", "-f", str(path)])
    assert (done.exit_code, done.stdout, "warning" in done.stderr) == (0, "ok\n", False), done.output


@pytest.mark.parametrize("name", cluster_names())
@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_becomes_objects_on_every_cluster_that_ships_or_says_what_it_lacks(path: Path, name: str) -> None:
    """tests/cluster/test_shipped_files.py starts them."""
    job, profile = parse_job_file(path.read_text(), str(path)), cluster(name).profile
    if path.stem == "trainingjob-rdma" and name != "barcelona":
        with pytest.raises(Refused, match="RDMA"):
            resolve(job, profile, MADE)
        return
    kinds = {item["kind"] for item in render(resolve(job, profile, MADE))}
    assert {"StatefulSet", "Service", "ConfigMap"} <= kinds


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_names_its_cluster_in_its_first_line_and_fits_it(path: Path) -> None:
    text = path.read_text()
    job = parse_job_file(text, str(path))
    name = job.spec.cluster
    assert name is not None
    assert text.startswith(f"# For clusters/{name}.yaml: ")
    resolved = resolve(job, cluster(name).profile, MADE)
    assert resolved.nodes == job.spec.nodes


def test_the_samples_show_what_there_is() -> None:
    jobs = {path.stem: parse_job_file(path.read_text(), path.name).spec for path in SAMPLES}
    assert sorted(jobs) == [
        "dev-environment",
        "trainingjob",
        "trainingjob-glm-air",
        "trainingjob-rdma",
        "trainingjob-script",
        "trainingjob-zero3",
    ]
    assert {spec.training.zero_stage.value for spec in jobs.values() if spec.training} == {"Stage2", "Stage3"}
    assert jobs["trainingjob-script"].script is not None


def test_the_rdma_sample_gets_rdma_and_the_demo_tcp() -> None:
    by_name = {path.stem: parse_job_file(path.read_text(), path.name) for path in SAMPLES}
    found = {name: resolve(by_name[name], cluster(str(by_name[name].spec.cluster)).profile, MADE).transport for name in by_name}
    assert (found["trainingjob-rdma"], found["trainingjob"]) == (Transport.RDMA, Transport.TCP)


def test_the_sample_of_a_config_yaml_has_its_values() -> None:
    """docs/how-to/from-config-yaml.md promises them key by key."""
    path = ROOT / "manifests/samples/trainingjob-glm-air.yaml"
    job = parse_job_file(path.read_text(), path.name)
    resolved = resolve(job, load_cluster(str(CLUSTERS / "template.yaml")).profile)
    assert (resolved.nodes, job.spec.gpus_per_node) == (2, 4)
    training = job.spec.training
    optimization, checkpoint = training.optimization, training.checkpoint
    assert (training.data.max_length, optimization.epochs, optimization.learning_rate) == (16384, 3, "2e-5")
    assert (optimization.micro_batch_size, optimization.global_batch_size) == (1, 1 * 2 * 16)  # of the configuration; 1 × 4 × 8 here
    assert (training.evaluation.samples, training.evaluation.every_steps) == (200, 50)
    assert (checkpoint.content.value, checkpoint.every_steps, checkpoint.keep) == ("Full", 100, 10)
    assert (training.lora.rank, training.lora.alpha, training.lora.target_modules) == (16, 32, ["q_proj", "k_proj", "v_proj", "o_proj"])
    assert f"{float(optimization.learning_rate) / float(optimization.warmup_steps):.2e}" == "1.33e-07"


def test_every_field_that_the_table_of_a_config_yaml_names_is_there() -> None:
    """Fields stand in the second column, in backquotes, in tables from that of a config.yaml on; later ones of a row have no section."""
    _, head, text = (ROOT / "docs/how-to/from-config-yaml.md").read_text().partition("| `config.yaml` |")
    cells = [line.split("|")[2] for line in (head + text).splitlines() if line.startswith("| ") and "`" in line.split("|")[2]]
    named = {word.split(":")[0].strip() for cell in cells for word in re.findall(r"`([^`]+)`", cell)}
    schema = Training.model_json_schema(by_alias=True)
    sections = {name: _section(schema, name) for name in schema["properties"]}
    known = (
        set(sections)
        | {f"{name}.{key}" for name, keys in sections.items() for key in keys}
        | {key for keys in sections.values() for key in keys}
    )
    assert len(named) > 35
    assert sorted(name for name in named - known if name not in {"spec.training", "spec.env", "spec.hangTimeouts.collectiveSeconds"}) == []


def _section(schema: dict[str, Any], name: str) -> set[str]:
    found = re.search(r"#/\$defs/(\w+)", str(schema["properties"][name]))
    return set(schema["$defs"][found[1]].get("properties", {})) if found else set()
