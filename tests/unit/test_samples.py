"""The cluster files and samples that ship load as they stand, and fit to each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.api.clusterfile import ClusterFile
from lockstep.api.clusterkeys import KEYS
from lockstep.api.jobfile import parse_job_file
from lockstep.api.profile import ClusterProfileSpec
from lockstep.api.shared import StorageMode
from lockstep.cli.clusters import cluster_names, load_cluster
from lockstep.plan.resolve import Transport, resolve

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = ROOT / "clusters"
SAMPLES = sorted((ROOT / "manifests/samples").glob("trainingjob*.yaml"))


def cluster(name: str) -> ClusterFile:
    return load_cluster(name, CLUSTERS)


def test_the_clusters_that_ship() -> None:
    assert cluster_names(CLUSTERS) == ["barcelona", "local", "nerc-production"]


@pytest.mark.parametrize("name", cluster_names(CLUSTERS))
def test_a_cluster_that_ships_loads(name: str) -> None:
    assert cluster(name).profile.spec != ClusterProfileSpec()


def test_barcelona_has_rdma_and_a_volume_for_every_pod() -> None:
    found = cluster("barcelona").profile.spec
    assert (found.network.rdma.enabled, found.storage.mode) == (True, StorageMode.PER_POD)
    assert [rail.resource for rail in found.network.rdma.rails] == [f"openshift.io/eno{n}np0rdma" for n in (5, 6, 7, 8)]


def test_nerc_production_has_tcp_and_one_shared_volume() -> None:
    found = cluster("nerc-production").profile.spec
    assert (found.network.rdma.enabled, found.storage.mode, found.nodes.gpu_nodes) == (False, StorageMode.SHARED, [])


def test_the_template_has_every_key() -> None:
    text = (CLUSTERS / "template.yaml").read_text()
    load_cluster(str(CLUSTERS / "template.yaml"), CLUSTERS)
    names = {part.removesuffix("[]") for key in KEYS for part in key.split(".")}
    assert [name for name in sorted(names) if f"{name}:" not in text] == []


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_names_its_cluster_in_its_first_line_and_runs_there(path: Path) -> None:
    text = path.read_text()
    job = parse_job_file(text, str(path))
    name = job.spec.cluster_profile_name
    assert name is not None
    assert text.startswith(f"# For clusters/{name}.yaml: ")
    resolved = resolve(job, cluster(name).profile)
    assert resolved.nodes == job.spec.nodes


def test_the_samples_show_what_there_is() -> None:
    jobs = {path.stem: parse_job_file(path.read_text(), path.name).spec for path in SAMPLES}
    assert sorted(jobs) == ["trainingjob", "trainingjob-glm-air", "trainingjob-rdma", "trainingjob-script", "trainingjob-zero3"]
    assert {spec.training.zero_stage.value for spec in jobs.values() if spec.training} == {"Stage2", "Stage3"}
    assert jobs["trainingjob-script"].script is not None


def test_the_rdma_sample_gets_rdma_and_the_demo_tcp() -> None:
    by_name = {path.stem: parse_job_file(path.read_text(), path.name) for path in SAMPLES}
    found = {name: resolve(by_name[name], cluster(str(by_name[name].spec.cluster_profile_name)).profile).transport for name in by_name}
    assert (found["trainingjob-rdma"], found["trainingjob"]) == (Transport.RDMA, Transport.TCP)
