"""What NCCL logs in real pods becomes condition, status and, where a job asks for it, its end. NCCL is pretended, and so are the GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from lockstep.devcluster.server import set_resources
from lockstep.kube.cluster import Client
from support.clusters.cluster_jobs import API, Jobs, until

LOGS = Path(__file__).resolve().parents[3] / "fabric_logs"
GOOD, SOCKETS = "2.18-ib-peermem", "2.18-sockets-no-libibverbs"
PRETEND = """import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
log = sys.argv[1 + int(os.environ["NODE_RANK"])]
path = os.environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid()))
with open(path, "w") as file:
    file.write(open(f"/fabric/{log}.log").read())
signal.pause()
"""


@pytest.fixture(scope="module")
def gpus(jobs: Jobs) -> Iterator[None]:
    """One pretended GPU a node, for this module only."""
    core = client.CoreV1Api(jobs.api.client)
    nodes = [node.metadata.name for node in core.list_node().items if node.status.capacity]
    for node in nodes:
        set_resources(Client(), node, {"nvidia.com/gpu": 1})
    yield
    for node in nodes:
        set_resources(Client(), node, {})


@pytest.fixture(scope="module")
def rdma(jobs: Jobs) -> Iterator[str]:
    """The name of a cluster like `local` that says it has RDMA, and the logs that ranks pretend to write."""
    data = {"pretend.py": PRETEND, **{f"{name}.log": (LOGS / f"{name}.log").read_text() for name in (GOOD, SOCKETS)}}
    jobs.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "fabric"}, "data": data})
    kind = jobs.kind("TrainingCluster", API)
    spec = kind.get(name="local").to_dict()["spec"]
    spec["gpus"] = {**(spec.get("gpus") or {}), "perNode": 1}
    spec["network"] |= {"mode": "Auto", "rdma": {"enabled": True, "memlock": "Unlimited"}}
    name = f"{jobs.namespace}-rdma"
    kind.create(body={"apiVersion": API, "kind": "TrainingCluster", "metadata": {"name": name}, "spec": spec})
    yield name
    kind.delete(name=name)


def start(jobs: Jobs, profile: str, name: str, *logs: str, **fabric: Any) -> None:
    """A job whose ranks write these logs, one a node, as NCCL would."""
    spec = {
        "cluster": profile,
        "nodes": 2,
        "gpusPerNode": 1,
        "fabric": fabric,
        "script": {"path": "/fabric/pretend.py", "args": list(logs)},
        "podTemplate": {"volumes": [{"name": "fabric", "mountPath": "/fabric", "configMap": {"name": "fabric"}}]},
        "restart": {"maxRestarts": 3, "backoffSeconds": 0},
        "preflight": "None",  # it would find that the GPUs are pretended
    }
    jobs.create({"apiVersion": API, "kind": "TrainingJob", "metadata": {"name": name}, "spec": spec})


def test_what_nccl_logs_on_both_nodes_is_verified_and_shown(jobs: Jobs, gpus: None, rdma: str) -> None:
    start(jobs, rdma, "verified", GOOD, GOOD)
    try:
        said = jobs.until_condition("verified", "FabricVerified", "True", "Verified")
        assert said["message"] == "RDMA over mlx5_0, mlx5_1 (IB), GPUDirect by nvidia-peermem, verified on 2 of 2 ranks"
        assert jobs.job("verified")["status"]["fabric"] == {
            "transport": "RDMA", "network": "IB", "hcas": ["mlx5_0", "mlx5_1"], "link": "IB", "interfaces": ["eth0"],
            "gpuDirect": "nvidia-peermem", "ncclVersion": "2.18.1", "ranksHeard": 2, "differing": [],
        }  # fmt: skip
    finally:
        jobs.end("verified")
        until("no pods", lambda: not jobs.pods("verified"))


def test_a_job_that_refuses_a_degraded_fabric_ends_at_once_with_ranks_interface_and_reason(jobs: Jobs, gpus: None, rdma: str) -> None:
    start(jobs, rdma, "refused", GOOD, SOCKETS, mode="RDMA", degradedPolicy="Fail")
    try:
        sentence = "asked for RDMA, rank 1 on node 1 uses sockets (enp1s0): libibverbs could not be opened"
        failed = jobs.until_condition("refused", "Failed", "True", "RanksFailed")
        assert failed["message"] == sentence
        verified = jobs.condition("refused", "FabricVerified")
        assert (verified["status"], verified["reason"], verified["message"]) == ("False", "FellBackToTCP", sentence)
        status = jobs.job("refused")["status"]
        assert (status["attempts"], status["failure"]["cause"], status["fabric"]["transport"]) == (1, "Fabric", "TCP")
        (differing,) = status["fabric"]["differing"]
        assert (differing["ranks"], differing["nodeName"]) == ("1", status["failure"]["nodeName"])
    finally:
        jobs.end("refused")
