"""The cluster files and samples that ship, started with their real entry command as far as a cluster without GPUs, NICs and models goes: to
the trainer's own words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import yaml

from lockstep.cli.shared.clusterfiles import load_cluster
from support.checkout import ROOT
from support.clusters.cluster_jobs import Jobs, cluster_like_local

CLUSTERS, SAMPLES = ROOT / "clusters", ROOT / "manifests/samples"
OF_THE_EMBEDDED = ("platform", "storage", "image", "pod", "resources", "shmSize")
"""Parts of a cluster that name what only that one has: its classes, images and sizes."""
STARTED = [
    ("barcelona", "trainingjob-glm-air"),
    ("barcelona", "trainingjob-rdma"),
    ("nerc-production", "trainingjob"),
    ("nerc-production", "dev-environment"),
    ("local", "trainingjob-zero3"),
    ("local", "trainingjob-script"),
]
"""Every cluster file, and every sample: its own cluster first. tests/unit/project/test_samples.py renders all of each with all of the
other.
"""


def test_every_file_that_ships_is_among_those_started() -> None:
    assert {cluster for cluster, _ in STARTED} == {path.stem for path in CLUSTERS.glob("*.yaml")} - {"template", "template-hosts"}
    assert {sample for _, sample in STARTED} == {path.stem for path in SAMPLES.glob("*.yaml")}


def shipped(name: str) -> Callable[[dict[str, Any]], None]:
    """The file's spec, with what the embedded cluster has in place of GPUs, NICs, storage classes and images."""
    spec = load_cluster(name).profile.spec.to_dict()
    kept = {key: value for key, value in spec.items() if key not in OF_THE_EMBEDDED}
    kept["gpus"] = {**kept.get("gpus", {}), "perNode": 0}
    kept["nodes"] = {}
    kept["network"] = {**kept["network"], "rdma": {"enabled": False}}
    kept["security"] = {**kept.get("security", {}), "ipcLock": False}

    def change(own: dict[str, Any]) -> None:
        own.update(kept)

    return change


@pytest.fixture(scope="module")
def started(jobs: Jobs) -> Iterator[dict[tuple[str, str], str]]:
    """Names of the jobs, all started at once."""
    with ExitStack() as stack:
        clusters = {
            name: stack.enter_context(cluster_like_local(jobs, name, shipped(name))) for name in {cluster for cluster, _ in STARTED}
        }
        names = {}
        for cluster, sample in STARTED:
            body = yaml.safe_load((SAMPLES / f"{sample}.yaml").read_text())
            names[cluster, sample] = body["metadata"]["name"] = f"{cluster}-{sample}"[:40].rstrip("-")
            body["spec"] |= {"cluster": clusters[cluster], "nodes": 1, "preflight": "None"}
            for field in ("gpusPerNode", "fabric", "env", "restart"):
                body["spec"].pop(field, None)
            jobs.create(body)
        yield names
        for name in names.values():
            jobs.end(name)


@pytest.mark.parametrize(("file", "sample"), STARTED, ids=[f"{sample} on {cluster}" for cluster, sample in STARTED])
def test_a_sample_starts_its_real_command_on_a_cluster_of_a_file_that_ships(
    started: dict[tuple[str, str], str], jobs: Jobs, file: str, sample: str
) -> None:
    name = started[file, sample]
    if sample == "dev-environment":
        jobs.until_condition(name, "Progressing", "True", "Ready", 120)
        return
    jobs.until_condition(name, "Failed", "True", "RanksFailed", 240)
    failure = jobs.job(name)["status"]["failure"]
    training = yaml.safe_load((SAMPLES / f"{sample}.yaml").read_text())["spec"].get("training")
    words = " ".join([failure["message"], *failure.get("lastLines", ())])
    assert (training["model"]["name"] if training else "can't open file '/workspace/train_multi_node.py'") in words, failure
