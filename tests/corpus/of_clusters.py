"""Faults of what is around a job: the cluster, its pods and its objects."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kubernetes import client

from cluster_jobs import API, SERVICE_ACCOUNT, Jobs, until
from corpus.of_processes import RANKS
from corpus.verdicts import Expected, Fault
from lockstep.api.names import OPERATOR_NAME, OPERATOR_NAMESPACE
from lockstep.devcluster import processes
from lockstep.devcluster.layout import default_layout

STEPS = RANKS + "for step in range(4, 100000): steps(step, step)\n"


@dataclass(frozen=True)
class Place:
    """A job on a cluster, and all that can be done to it."""

    jobs: Jobs
    name: str

    @property
    def core(self) -> client.CoreV1Api:
        return client.CoreV1Api(self.jobs.api.client)

    @property
    def namespace(self) -> str:
        return self.jobs.namespace

    def agent(self, node: int) -> int:
        """The process of this machine that is the agent of a node."""
        pod = self.core.read_namespaced_pod(f"{self.name}-{node}", self.namespace)
        uid = str(pod.metadata.uid).replace("-", "_")
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command, group = (folder / "cmdline").read_bytes(), (folder / "cgroup").read_text()
            except OSError:
                continue
            if b"agent.pyz" in command and (uid in group or str(pod.metadata.uid) in group):
                return int(folder.name)
        raise AssertionError(f"no agent of {self.name}-{node} runs here")

    def address(self, node: int) -> str:
        return str(self.core.read_namespaced_pod(f"{self.name}-{node}", self.namespace).status.pod_ip)


Act = Callable[[Place], object]


def nothing(_: Place) -> None:
    """The job's own spec or script is the fault."""


@dataclass(frozen=True)
class ClusterFault(Fault):
    """A job of two nodes, and what happens to it."""

    spec: dict[str, Any] = field(default_factory=dict)
    script: str = STEPS
    before: Act = nothing
    """What is done before the job is made."""
    act: Act | None = None
    """What is done once its ranks have made steps; None: they needn't come so far."""
    meanwhile: Act = nothing
    """What is done while it starts."""
    after: Act = nothing
    """What undoes it."""
    seconds: float = 60.0


def _of(cause: str, says: str, remedy: str, **who: Any) -> Expected:
    return Expected(cause, says, remedy, **who)


def _waits(reason: str, says: str, remedy: str) -> Expected:
    return Expected(reason, says, remedy, state="Waiting")


def _refused(reason: str, says: str, remedy: str) -> Expected:
    return Expected(reason, says, remedy, state="Refused")


def _quota(place: Place) -> None:
    place.jobs.create({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "pods"}, "spec": {"hard": {"pods": "1"}}})


def _no_quota(place: Place) -> None:
    place.jobs.delete("ResourceQuota", "pods")


def _service_of_somebody(place: Place) -> None:
    spec = {"ports": [{"port": 1}], "selector": {"app": "somebody"}}
    place.jobs.create({"apiVersion": "v1", "kind": "Service", "metadata": {"name": f"{place.name}-headless"}, "spec": spec})


def _no_service_of_somebody(place: Place) -> None:
    place.jobs.delete("Service", f"{place.name}-headless")


def _no_account(place: Place) -> None:
    place.jobs.delete("ServiceAccount", SERVICE_ACCOUNT)


def _account(place: Place) -> None:
    place.jobs.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": SERVICE_ACCOUNT}})


def _cluster_like_local(change: Callable[[dict[str, Any]], None]) -> Act:
    def make(place: Place) -> None:
        kind = place.jobs.kind("TrainingCluster", API)
        spec = kind.get(name="local").to_dict()["spec"]
        change(spec)
        kind.create(
            body={"apiVersion": API, "kind": "TrainingCluster", "metadata": {"name": f"{place.namespace}-{place.name}"}, "spec": spec}
        )

    return make


def _no_such_cluster(place: Place) -> None:
    place.jobs.kind("TrainingCluster", API).delete(name=f"{place.namespace}-{place.name}")


def _little_memory(spec: dict[str, Any]) -> None:
    spec["resources"] = {**(spec.get("resources") or {}), "limits": {"memory": "256Mi"}}


def _no_class(spec: dict[str, Any]) -> None:
    spec["storage"] = {**(spec.get("storage") or {}), "mode": "PerPod", "classRwo": "lockstep-no-such-class"}


def _taint(place: Place) -> None:
    for node in place.core.list_node().items:
        place.core.patch_node(node.metadata.name, {"spec": {"taints": [{"key": "maintenance", "value": "disks", "effect": "NoSchedule"}]}})


def _untaint(place: Place) -> None:
    for node in place.core.list_node().items:
        place.core.patch_node(node.metadata.name, {"spec": {"taints": None}})


def _signal(node: int, number: signal.Signals) -> Act:
    return lambda place: os.kill(place.agent(node), number)


def _cut(place: Place) -> None:
    """Nothing that node 1 sends to node 0 leaves it; the rest of its network is well."""
    route = ["ip", "route", "add", "blackhole", f"{place.address(0)}/32"]
    subprocess.run(["nsenter", "-t", str(place.agent(1)), "-n", *route], check=True, capture_output=True)


def _delete(kind: str, name: str, version: str = "v1") -> Act:
    return lambda place: place.jobs.delete(kind, name.format(place.name), version)


def _delete_pod_now(place: Place) -> None:
    place.core.delete_namespaced_pod(f"{place.name}-1", place.namespace, grace_period_seconds=0)


def _evict(place: Place) -> None:
    body: Any = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": f"{place.name}-1", "namespace": place.namespace}}
    place.core.create_namespaced_pod_eviction(f"{place.name}-1", place.namespace, body)


def _key_is_gone(place: Place) -> None:
    place.jobs.delete("Secret", place.jobs.key_secret(place.name))


def _scaled_by_hand(place: Place) -> None:
    place.jobs.patch("StatefulSet", place.name, {"spec": {"replicas": 1}}, "apps/v1")


def _operators(place: Place, count: int) -> None:
    apps = client.AppsV1Api(place.jobs.api.client)
    apps.patch_namespaced_deployment_scale(OPERATOR_NAME, OPERATOR_NAMESPACE, {"spec": {"replicas": count}})


def _no_operator(place: Place) -> None:
    _operators(place, 0)


def _operator_again(place: Place) -> None:
    _operators(place, 2)
    apps = client.AppsV1Api(place.jobs.api.client)
    until(
        "the operator is back", lambda: (apps.read_namespaced_deployment(OPERATOR_NAME, OPERATOR_NAMESPACE).status.ready_replicas or 0) >= 1
    )


def _resolver(number: signal.Signals) -> Act:
    def send(_: Place) -> None:
        daemon = processes.running(default_layout().daemons, "coredns")
        assert daemon is not None
        os.kill(daemon.pid, number)

    return send


def _corrected(place: Place) -> None:
    until("the image is missed", lambda: place.jobs.condition(place.name, "RanksReady").get("reason") == "ImagePullFailed")
    place.jobs.change(place.name, image=None)


FAILS = RANKS + "if RANK == 1: raise ValueError('bad label')\nwait()\n"
HANGS = RANKS + "if RANK == 1: os.kill(os.getpid(), signal.SIGSTOP)\nfor step in range(4, 100000): steps(step, step)\n"
EATS = RANKS + "if RANK == 1:\n    held = bytearray(os.urandom(1 << 20)) * 600\nwait()\n"
NO_IMAGE = "localhost/lockstep/none:1"
ONCE = {"restart": {"maxRestarts": 1, "backoffSeconds": 1}}

CLUSTER_FAULTS = (
    ClusterFault("no-image", "the image isn't there", _waits("ImagePullFailed", NO_IMAGE, "image"), {"image": NO_IMAGE}),
    ClusterFault("image-corrected", "the image isn't there, and then the job is corrected", _of("", "step", "logs", state="Running"), {"image": NO_IMAGE}, meanwhile=_corrected, seconds=120.0),
    ClusterFault("no-account", "the service account is missing", _refused("ServiceAccountNotFound", SERVICE_ACCOUNT, "kubectl create serviceaccount"), before=_no_account, after=_account),
    ClusterFault("no-cluster", "the job names a TrainingCluster that isn't there", _refused("ClusterNotFound", "nowhere", "lockstep deploy"), {"cluster": "nowhere"}),
    ClusterFault("no-rdma", "RDMA is asked for, and the cluster has none", _refused("RDMAUnavailable", "no RDMA", "Auto|TCP"), {"fabric": {"mode": "RDMA"}}),
    ClusterFault("no-claim", "the claim that the job names is missing", _waits("ClaimNotBound", "none-such", "claim"), {"storage": {"workspaceClaimName": "none-such"}}),
    ClusterFault("no-secret", "a Secret of envFrom is missing", _waits("ContainerNotStarted", "none-such", "Secret|secret"), {"envFrom": [{"secretRef": {"name": "none-such"}}]}),
    ClusterFault("selector", "no Node has the labels that are asked for", _waits("Unschedulable", "disk.*nvme|node affinity|selector", "nodeSelector|label"), {"podTemplate": {"nodeSelector": {"disk": "nvme"}}}),
    ClusterFault("no-gpus", "no Node has a GPU", _waits("Unschedulable", "nvidia.com/gpu", "GPU|gpu"), {"gpusPerNode": 1}),
    ClusterFault("taint", "all Nodes are tainted", _waits("Unschedulable", "maintenance", "tolerat|taint"), before=_taint, after=_untaint),
    ClusterFault("quota", "a quota forbids the second pod", _waits("PodsRefused", "quota", "quota"), before=_quota, after=_no_quota),
    ClusterFault("priority", "the PriorityClass is missing", _waits("PodsRefused", "none-such", "PriorityClass|priorityClass|priority"), {"podTemplate": {"priorityClassName": "none-such"}}),
    ClusterFault("no-class", "the storage class is missing", _waits("ClaimNotBound", "lockstep-no-such-class", "class"), before=_cluster_like_local(_no_class), after=_no_such_cluster),
    ClusterFault("name-taken", "somebody's Service has the job's name", _refused("NameTaken", "headless", "delete|another name|rename"), before=_service_of_somebody, after=_no_service_of_somebody),
    ClusterFault("no-script", "the script isn't on the volume", _of("Configuration", "/workspace/train.py", "put it there|change what the message names", node=0), {"script": {"path": "/workspace/train.py"}}),
    ClusterFault("no-dns", "the cluster's DNS is away", _of("DNSUnavailable", "DNS|name", "DNS|dns", state="Waiting"), before=_resolver(signal.SIGSTOP), after=_resolver(signal.SIGCONT)),
    ClusterFault("deadline", "the job's time is up", _of("DeadlineExceeded", "activeDeadlineSeconds|deadline", "activeDeadlineSeconds|deadline"), {"activeDeadlineSeconds": 20}, seconds=90.0),
    ClusterFault("raises", "a rank raises an exception", _of("UserCode", "ValueError: bad label", "correct it first", rank=1, node=1), script=FAILS),
    ClusterFault("hangs", "a rank is stopped", _of("Hang", "is stopped", "stacks", rank=1, node=1), {"hangTimeouts": {"stepSeconds": 5}}, script=HANGS),
    ClusterFault("memory", "a rank takes more memory than its pod may", _of("OutOfMemory", "limit of 256 MiB", "memory", node=1), script=EATS, before=_cluster_like_local(_little_memory), after=_no_such_cluster),
    ClusterFault("partition", "two pods can't talk to each other", _of("NodeNotHeard", "node 1 .*not heard", "on which Nodes", state="NodeNotHeard"), act=_cut, seconds=25.0),
    ClusterFault("partition-lasts", "two pods can't talk for longer than a node is waited for", _of("NodeLost", "network between the two", "network|node", node=1), act=_cut, seconds=120.0),
    ClusterFault("pod-agent-frozen", "an agent gets no CPU", _of("NodeLost", "stopped or gets no CPU", "node", node=1), act=_signal(1, signal.SIGSTOP), seconds=120.0),
    ClusterFault("pod-agent-killed", "an agent is killed", _of("NodeLost", "node 1", "node", node=1), act=_signal(1, signal.SIGKILL)),
    ClusterFault("coordinator-killed", "the agent with the coordinator is killed", _of("NodeLost", "node 0", "node", node=0), act=_signal(0, signal.SIGKILL)),
    ClusterFault("pod-deleted", "a pod is deleted", _of("NodeLost", "node 1", "logs", node=1, state="Running"), act=_delete("Pod", "{}-1"), seconds=120.0),
    ClusterFault("pod-force-deleted", "a pod is deleted by force", _of("NodeLost", "node 1", "logs", node=1, state="Running"), ONCE, act=_delete_pod_now, seconds=120.0),
    ClusterFault("evicted", "a pod is evicted, as a drain does it", _of("Preempted", "node 1", "logs", node=1, state="Running"), act=_evict, seconds=120.0),
    ClusterFault("scaled", "somebody scales the StatefulSet", _of("", "scaled|replicas", "spec.nodes|lockstep scale", state="Running"), ONCE, act=_scaled_by_hand, seconds=120.0),
    ClusterFault("set-deleted", "somebody deletes the StatefulSet", _of("", "StatefulSet", "", state="Running"), ONCE, act=_delete("StatefulSet", "{}", "apps/v1"), seconds=120.0),
    ClusterFault("service-deleted", "somebody deletes the Service", _of("", "Service .*made again", "logs", state="Running"), act=_delete("Service", "{}-headless")),
    ClusterFault("key-deleted", "somebody deletes the Secret with the agents' key", _of("", "", "", state="Running"), act=_key_is_gone, seconds=20.0),
    ClusterFault("no-operator", "the operator is away", _of("", "operator", "lockstep doctor", state="Running"), act=_no_operator, after=_operator_again, seconds=120.0),
)  # fmt: skip
