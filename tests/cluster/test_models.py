"""Base models by name on a real cluster: ahead of time by a pod of a minute, and by the job's own pods, each volume once."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, dynamic

from cluster.operator.verbs.test_verbs import lockstep
from lockstep.cli.clusters.demo import demo_folder
from lockstep.cli.clusters.deploy import install_cluster
from lockstep.cli.clusters.deploymentplan import Mode
from lockstep.cli.shared.places import Verb
from lockstep.devcluster.host.layout import default_layout
from lockstep.plan.render.readerpod import LABEL_READER_OF
from support.clusters.cluster_jobs import API, Jobs, prepare, until
from support.hub_server import TOKEN, Hub, running_hub

NAME = "org/tiny-base"
DATA = {"name": "data", "mountPath": "/data", "configMap": {"name": "data"}}


@pytest.fixture(scope="module")
def jobs(api: dynamic.DynamicClient) -> Iterator[Jobs]:
    """A namespace of this module's own on a cluster with the operator, with a Secret of the hub's token and a few lines of data."""
    install_cluster(Verb(), "local", Mode.TCP)
    core = client.CoreV1Api(api.client)
    namespace = core.create_namespace({"metadata": {"generateName": "lockstep-test-"}}).metadata.name
    rows = "".join(json.dumps({"text": f"The value of {number} is {number}."}) + "\n" for number in range(20))
    try:
        made = prepare(api, namespace)
        made.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "data"}, "data": {"rows.jsonl": rows}})
        secret = {"HF_TOKEN": base64.b64encode(TOKEN.encode()).decode()}
        made.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}, "data": secret})
        yield made
    finally:
        core.delete_namespace(namespace)


@pytest.fixture
def hub(cluster: Path) -> Iterator[Hub]:
    """At the address by which pods reach this machine."""
    with running_hub(default_layout().gateway) as hub:
        folder = demo_folder() / "models" / "tiny-base"
        hub.add(NAME, {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}, gated=True)
        yield hub


def job(name: str, hub: Hub, env: dict[str, str], **spec: Any) -> dict[str, Any]:
    training = {
        "model": {"name": NAME, "tokenSecret": {"name": "hub"}},
        "precision": "FP32",
        "data": {"path": "/data/rows.jsonl", "maxLength": 32},
        "optimization": {"maxSteps": 1},
    }
    variables = [{"name": key, "value": value} for key, value in {"HF_ENDPOINT": hub.endpoint, **env}.items()]
    given = {"nodes": 2, "training": training, "env": variables, "podTemplate": {"volumes": [DATA]}, "restart": {"maxRestarts": 0}}
    return {"apiVersion": API, "kind": "TrainingJob", "metadata": {"name": name}, "spec": given | spec}


@pytest.mark.long
def test_a_pod_of_a_minute_fills_the_volume_and_the_job_asks_nobody(jobs: Jobs, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job("ahead", hub, {})))
    told = lockstep(jobs, "model", "get", "-f", str(tmp_path / "job.yaml"))
    assert told.returncode == 0, told.stderr + told.stdout
    commit = hub.repositories["models", NAME].revisions["main"]
    assert told.stdout.splitlines()[-1] == f"{NAME} at {commit} is in /workspace/cache/models/org--tiny-base/{commit}"
    pods = jobs.kind("Pod").get(namespace=jobs.namespace, label_selector=LABEL_READER_OF).to_dict()["items"]
    assert [pod["metadata"]["name"] for pod in pods if not pod["metadata"].get("deletionTimestamp")] == []
    assert lockstep(jobs, "model", "get", "-f", str(tmp_path / "job.yaml")).returncode == 0

    hub.requests.clear()
    jobs.create(job("ahead", hub, {"HF_HUB_OFFLINE": "1"}, nodes=1))
    jobs.until_condition("ahead", "Complete", "True", "Complete", 240)
    assert hub.requests == []
    log = lockstep(jobs, "logs", "ahead").stdout
    assert f"Base model {NAME} at {commit} in /workspace/cache/models/org--tiny-base/{commit}" in log
    written = json.dumps(
        [jobs.job("ahead"), *(item.to_dict() for item in jobs.kind("ConfigMap").get(namespace=jobs.namespace).items)], default=str
    )
    assert TOKEN not in written + log + told.stdout + told.stderr
    jobs.end("ahead")


@pytest.mark.long
def test_where_each_pod_has_its_volume_each_fetches_and_no_access_is_one_sentence(jobs: Jobs, hub: Hub) -> None:
    commit = hub.repositories["models", NAME].revisions["main"]
    jobs.create(job("apart", hub, {}, storage={"mode": "PerPod"}))
    jobs.until_condition("apart", "Complete", "True", "Complete", 240)
    assert hub.requests.count(f"GET /{NAME}/resolve/{commit}/config.json") == 2
    assert hub.requests.count(f"GET /api/models/{NAME}") == 1
    jobs.end("apart")

    hub.repositories["models", NAME].readers.clear()
    jobs.create(job("gated", hub, {}, storage={"mode": "PerPod"}))
    until("it has failed", lambda: jobs.condition("gated", "Failed").get("status") == "True", 120)
    assert "is gated and the token's account has no access to it" in json.dumps(jobs.job("gated")["status"], default=str)
    jobs.end("gated")
