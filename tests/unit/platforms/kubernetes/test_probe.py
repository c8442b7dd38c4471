"""Probe pods: what they are, what they say of a node, and that none is left."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.api.errors import ConfigError
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.plan.cluster.facts import ClusterFacts, ProbeFacts
from lockstep.plan.discovery.probe import probe_pods, probed_nodes, read_probe
from lockstep.platforms.clusters import waits
from lockstep.platforms.kubernetes import probe
from lockstep_gang.agent.main import main as agent
from lockstep_gang.agent.preflight.facts import probed
from lockstep_spec.codec import to_json
from support.cluster_facts import node, rdma_cluster, with_namespace_rights
from support.fake_cluster import FakeCluster
from unit.kube.test_bounds import Recording

Object = dict[str, Any]
SAID = {
    "gpus": 4,
    "driver": "580.1",
    "hcas": {"mlx5_0": "ACTIVE"},
    "interfaces": {"eth0": 1500},
    "memlock_bytes": None,
    "capabilities": "0",
}


PULLING = {
    "spec": {"nodeName": "a"},
    "status": {"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]},
}


def test_every_node_with_gpus_is_looked_at_but_cordoned_ones() -> None:
    assert probed_nodes(rdma_cluster(Node=(node("a"), node("b", unschedulable=True), node("c", gpus=0)))) == ["a"]
    assert probed_nodes(with_namespace_rights(rdma_cluster())) == [None, None]


def test_of_a_pod_s_log_a_mebibyte_is_asked_for() -> None:
    connection: Any = Recording()
    asyncio.run(probe._log(Cluster(connection), {"metadata": {"namespace": "ns", "name": "p"}}))
    assert connection.urls == ["/api/v1/namespaces/ns/pods/p/log?container=probe&limitBytes=1048576"]


@pytest.mark.parametrize("facts", [rdma_cluster(), with_namespace_rights(rdma_cluster())])
def test_a_pod_asks_for_no_gpu_and_no_right(facts: ClusterFacts) -> None:
    for pod in probe_pods(facts, "t", "image:1"):
        container = pod["spec"]["containers"][0]
        assert container["securityContext"]["runAsNonRoot"] and container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "nvidia.com/gpu" not in json.dumps(container["resources"]) and not pod["spec"]["automountServiceAccountToken"]
        assert pod["spec"]["activeDeadlineSeconds"] > 0 and container["image"] == "image:1"


def test_pods_tolerate_what_the_file_will_say_of_the_nodes_with_gpus() -> None:
    taints = [{"key": "dedicated", "value": "ml", "effect": "NoSchedule"}]
    facts = rdma_cluster(Node=(node("a", taints=taints), node("b", taints=[*taints, {"key": "repair", "effect": "NoExecute"}])))
    gpus = {"key": "nvidia.com/gpu", "operator": "Exists"}
    own = {"key": "dedicated", "operator": "Equal", "value": "ml", "effect": "NoSchedule"}
    assert [pod["spec"]["tolerations"] for pod in probe_pods(facts, "t", "i")] == [[gpus, own], [gpus, own]]
    assert [pod["spec"]["tolerations"] for pod in probe_pods(with_namespace_rights(facts), "t", "i")] == [[gpus], [gpus]]


def test_without_names_of_nodes_pods_keep_apart_from_each_other() -> None:
    pods = list(probe_pods(with_namespace_rights(rdma_cluster()), "t", "i"))
    assert [list(pod["spec"]["affinity"]) for pod in pods] == [["podAntiAffinity"], ["podAntiAffinity"]]


@pytest.mark.parametrize(
    ("pod", "lines", "expected"),
    [
        ({"spec": {"nodeName": "a"}}, ["noise", "probed: " + json.dumps(to_json(ProbeFacts("a", **SAID)))], ProbeFacts("a", **SAID)),
        ({"spec": {"nodeName": "a"}}, ["python3: not found"], ProbeFacts("a", error="python3: not found")),
        ({"spec": {"nodeName": "a"}, "status": {"message": "it was evicted"}}, [], ProbeFacts("a", error="it was evicted")),
        ({"spec": {"nodeName": "a"}, "status": {"phase": "Succeeded"}}, [], ProbeFacts("a", error="it printed nothing")),
        ({"spec": {}}, [], ProbeFacts("a node that no pod reached", error="has not started after 120 s: Pending")),
        (PULLING, [], ProbeFacts("a", error="has not started after 120 s: ContainerCreating")),
    ],
)
def test_what_a_pod_saw_or_why_it_saw_nothing(pod: Object, lines: list[str], expected: ProbeFacts) -> None:
    assert read_probe(pod, lines) == expected


def test_what_keeps_probe_pods_from_running_is_told_as_soon_as_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "STUCK_SECONDS", 0.0)

    def begins(item: Object) -> None:
        if item["kind"] == "Pod":
            state = {"waiting": {"reason": "CreateContainerConfigError", "message": "image will run as root"}}
            item["status"] = {"phase": "Pending", "containerStatuses": [{"name": "probe", "image": "i", "state": state}]}
            item["spec"]["nodeName"] = "a"

    errors = [found.error for found in run(FakeCluster(on_create=begins))]
    assert len(errors) == 2 and all("container probe: CreateContainerConfigError: image will run as root" in error for error in errors)


class Api(FakeCluster):
    """Pods that end at once and say what they saw."""

    async def log(self, namespace: str, pod: str, container: str, query: Any) -> Any:
        yield "probed: " + json.dumps(SAID)


def ending(item: Object) -> None:
    if item["kind"] == "Pod":
        item["status"] = {"phase": "Succeeded"}
        item["spec"]["nodeName"] = "a"


async def _probe(cluster: FakeCluster) -> tuple[ProbeFacts, ...]:
    return await probe.probe_nodes(cluster.as_cluster, rdma_cluster(), "i")


@pytest.fixture(autouse=True)
def small_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "build_agent", lambda: b"agent")


def run(cluster: FakeCluster) -> tuple[ProbeFacts, ...]:
    import asyncio

    return asyncio.run(_probe(cluster))


def test_pods_and_their_agent_are_removed_when_all_have_ended() -> None:
    cluster = Api(on_create=ending)
    assert [found.gpus for found in run(cluster)] == [4, 4]
    assert cluster.objects == {}


def test_a_refused_pod_is_told_and_nothing_is_left() -> None:
    def refuse(item: Object) -> None:
        if item["metadata"]["name"].endswith("-1"):
            raise ApiError(403, "Forbidden", "exceeded quota")

    cluster = Api(on_create=refuse)
    with pytest.raises(ConfigError, match=r"the API server refused Pod lockstep-probe-.*: exceeded quota"):
        run(cluster)
    assert cluster.objects == {}


def test_pods_that_do_not_end_are_told_as_they_are_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "WAIT_SECONDS", 0.0)
    cluster = FakeCluster()
    monkeypatch.setattr(cluster, "log", Api.log.__get__(cluster), raising=False)
    assert len(run(cluster)) == 2 and cluster.objects == {}


def machine(root: Path) -> None:
    """A node with two GPUs and one HCA, as the kernel shows it in a pod."""
    for gpu in ("0000:1b:00.0", "0000:43:00.0"):
        (root / "proc/driver/nvidia/gpus" / gpu).mkdir(parents=True)
    (root / "proc/self").mkdir()
    (root / "proc/self/status").write_text("Name:\tpython\nCapEff:\t0000000000004000\n")
    for name, mtu in (("lo", 65536), ("eth0", 1500), ("net1", 9000)):
        (root / "sys/class/net" / name).mkdir(parents=True)
        (root / "sys/class/net" / name / "mtu").write_text(f"{mtu}\n")
    port = root / "sys/class/infiniband/mlx5_6/ports/1"
    port.mkdir(parents=True)
    for file, text in (("state", "4: ACTIVE"), ("link_layer", "Ethernet"), ("rate", "400 Gb/sec (4X NDR)")):
        (port / file).write_text(f"{text}\n")


def test_a_node_is_seen_as_the_kernel_shows_it(tmp_path: Path) -> None:
    machine(tmp_path)
    found = probed(tmp_path)
    assert (found["gpus"], found["hcas"], found["interfaces"]) == (
        2,
        {"mlx5_6": "ACTIVE Ethernet 400 Gb/sec (4X NDR)"},
        {"eth0": 1500, "net1": 9000},
    )
    assert found["capabilities"] == "0000000000004000"


def test_the_agent_says_it_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert agent(["probe"]) == 0
    assert read_probe({"spec": {"nodeName": "here"}}, capsys.readouterr().out.splitlines()).error == ""
