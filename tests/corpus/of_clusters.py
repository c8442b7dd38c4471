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

from corpus.of_processes import BOTH_WAIT, RANKS, TORCH
from corpus.verdicts import Expected, Fault
from lockstep.api.names import COORDINATOR_PORT, OPERATOR_NAME, OPERATOR_NAMESPACE
from lockstep.devcluster.host import processes
from lockstep.devcluster.host.layout import default_layout
from support.clusters.cluster_jobs import API, SERVICE_ACCOUNT, Jobs, until

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


def expect(cause: str, says: str, remedy: str, **who: Any) -> Expected:
    return Expected(cause, says, remedy, **who)


def waits(reason: str, says: str, remedy: str) -> Expected:
    return Expected(reason, says, remedy, state="Waiting")


def refused(reason: str, says: str, remedy: str) -> Expected:
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


def account(place: Place) -> None:
    place.jobs.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": SERVICE_ACCOUNT}})


def cluster_like_local(change: Callable[[dict[str, Any]], None]) -> Act:
    def make(place: Place) -> None:
        kind = place.jobs.kind("TrainingCluster", API)
        spec = kind.get(name="local").to_dict()["spec"]
        change(spec)
        kind.create(
            body={"apiVersion": API, "kind": "TrainingCluster", "metadata": {"name": f"{place.namespace}-{place.name}"}, "spec": spec}
        )

    return make


def no_such_cluster(place: Place) -> None:
    place.jobs.kind("TrainingCluster", API).delete(name=f"{place.namespace}-{place.name}")


def _much_memory(spec: dict[str, Any]) -> None:
    spec["resources"] = {**(spec.get("resources") or {}), "requests": {"memory": "128Mi"}, "limits": {"memory": "4Gi"}}


def both(*acts: Act) -> Act:
    def do(place: Place) -> None:
        for act in acts:
            act(place)

    return do


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


def delete(kind: str, name: str, version: str = "v1") -> Act:
    return lambda place: place.jobs.delete(kind, name.format(place.name), version)


def _delete_pod_now(place: Place) -> None:
    place.core.delete_namespaced_pod(f"{place.name}-1", place.namespace, grace_period_seconds=0)


def evict(place: Place) -> None:
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
        os.kill(daemon.pid, number)

    return send


def made(body: dict[str, Any]) -> Act:
    return lambda place: place.jobs.create(body)


def _daemon(name: str, number: signal.Signals) -> Act:
    """A program of the control plane that is stopped, or goes on."""

    def send(_: Place) -> None:
        daemon = processes.running(default_layout().daemons, name)
        os.kill(daemon.pid, number)

    return send


def _no_large_packets(place: Place) -> None:
    """As behind a tunnel whose MTU is smaller than both ends believe: small packets pass, full ones don't."""
    rule = ["iptables", "-A", "OUTPUT", "-d", f"{place.address(0)}/32", "-m", "length", "--length", "1000:65535", "-j", "DROP"]
    subprocess.run(["nsenter", "-t", str(place.agent(1)), "-n", *rule], check=True, capture_output=True)


def _only_agents_talk(place: Place) -> None:
    """All ports but the coordinator's are closed between the pods."""
    until("both nodes have agents", lambda: _has_agent(place, 0) and _has_agent(place, 1), 90)
    rule = ["iptables", "-A", "OUTPUT", "-d", f"{place.address(0)}/32", "-p", "tcp", "!", "--dport", str(COORDINATOR_PORT), "-j", "DROP"]
    subprocess.run(["nsenter", "-t", str(place.agent(1)), "-n", *rule], check=True, capture_output=True)


def _has_agent(place: Place, node: int) -> bool:
    try:
        return bool(place.agent(node))
    except (AssertionError, client.ApiException):
        return False


def nodes(spec: dict[str, Any]) -> Act:
    def change(place: Place) -> None:
        for node in place.core.list_node().items:
            place.core.patch_node(node.metadata.name, {"spec": spec})

    return change


def _drain_taint(place: Place) -> None:
    """On the Node of pod 1 alone."""
    node = place.core.read_namespaced_pod(f"{place.name}-1", place.namespace).spec.node_name
    place.core.patch_node(node, {"spec": {"taints": [{"key": "maintenance", "effect": "NoExecute"}]}})


def _labels_gone(place: Place) -> None:
    place.jobs.patch("Pod", f"{place.name}-1", {"metadata": {"labels": None}})


def _template_changed(place: Place) -> None:
    pod = {"metadata": {"annotations": {"somebody": "was here"}}}
    place.jobs.patch("StatefulSet", place.name, {"spec": {"template": pod}}, "apps/v1")


def _other_selector(place: Place) -> None:
    place.jobs.patch("Service", f"{place.name}-headless", {"spec": {"selector": {"app": "somebody"}}})


def _finalizer(place: Place) -> None:
    place.jobs.patch("Pod", f"{place.name}-1", {"metadata": {"finalizers": ["example.com/keeps"]}})
    place.jobs.delete("Pod", f"{place.name}-1")


def _no_finalizer(place: Place) -> None:
    if place.jobs.get("Pod", f"{place.name}-1"):
        place.jobs.patch("Pod", f"{place.name}-1", {"metadata": {"finalizers": None}})


def _webhook_of_nobody(place: Place) -> None:
    service = {"name": "none-such", "namespace": place.namespace, "path": "/"}
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    where = {"matchLabels": {"kubernetes.io/metadata.name": place.namespace}}
    hook = {"name": "pods.example.com", "clientConfig": {"service": service}, "rules": [rule], "namespaceSelector": where,
            "admissionReviewVersions": ["v1"], "sideEffects": "None", "failurePolicy": "Fail", "timeoutSeconds": 2}  # fmt: skip
    kind = place.jobs.kind("ValidatingWebhookConfiguration", "admissionregistration.k8s.io/v1")
    kind.create(body={"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": place.namespace}, "webhooks": [hook]})  # fmt: skip


def _no_webhook(place: Place) -> None:
    place.jobs.kind("ValidatingWebhookConfiguration", "admissionregistration.k8s.io/v1").delete(name=place.namespace)


def _kill_rank(place: Place) -> None:
    ranks = [int(child) for child in Path(f"/proc/{place.agent(1)}/task/{place.agent(1)}/children").read_text().split()]
    for pid in ranks:
        if b"/scripts/script.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return os.kill(pid, signal.SIGKILL)
    raise AssertionError("no rank runs")


def _corrected(place: Place) -> None:
    until("the image is missed", lambda: place.jobs.condition(place.name, "RanksReady").get("reason") == "ImagePullFailed")
    place.jobs.change(place.name, image=None)


FAILS = RANKS + "if RANK == 1: raise ValueError('bad label')\nwait()\n"
HANGS = RANKS + "if RANK == 1: os.kill(os.getpid(), signal.SIGSTOP)\nfor step in range(4, 100000): steps(step, step)\n"
EATS = RANKS + "if RANK == 1:\n    held = bytearray(os.urandom(1 << 20)) * 600\nwait()\n"
NO_IMAGE = "localhost/lockstep/none:1"
TALKS = (
    TORCH
    + RANKS
    + """\
torch, dist = ranks_talk()
large = torch.ones(1 << 20)
for step in range(4, 100000):
    dist.all_reduce(large)
    steps(step, step)
"""
)
PATIENT = {"hangTimeouts": {"stepSeconds": 10}}
ONCE = {"restart": {"maxRestarts": 1, "backoffSeconds": 1}}

CLUSTER_FAULTS = (
    ClusterFault("no-image", "the image isn't there", waits("ImagePullFailed", NO_IMAGE, "image"), {"image": NO_IMAGE}),
    ClusterFault("image-corrected", "the image isn't there, and then the job is corrected", expect("", "step", "logs", state="Running"),
        {"image": NO_IMAGE}, meanwhile=_corrected, seconds=120.0),
    ClusterFault("no-account", "the service account is missing",
        refused("ServiceAccountNotFound", SERVICE_ACCOUNT, "kubectl create serviceaccount"), before=_no_account, after=account),
    ClusterFault("no-cluster", "the job names a TrainingCluster that isn't there", refused("ClusterNotFound", "nowhere", "lockstep deploy"),
        {"cluster": "nowhere"}),
    ClusterFault("no-rdma", "RDMA is asked for, and the cluster has none", refused("RDMAUnavailable", "no RDMA", "Auto|TCP"),
        {"fabric": {"mode": "RDMA"}}),
    ClusterFault("no-claim", "the claim that the job names is missing", waits("ClaimNotBound", "none-such", "claim"),
        {"storage": {"workspaceClaimName": "none-such"}}),
    ClusterFault("no-secret", "a Secret of envFrom is missing", waits("ContainerNotStarted", "none-such", "Secret|secret"),
        {"envFrom": [{"secretRef": {"name": "none-such"}}]}),
    ClusterFault("selector", "no Node has the labels that are asked for",
        waits("Unschedulable", "disk.*nvme|node affinity|selector", "nodeSelector|label"),
            {"podTemplate": {"nodeSelector": {"disk": "nvme"}}}),
    ClusterFault("no-gpus", "GPUs are asked for, and the cluster has none", refused("NoGPUs", "has no GPUs", "gpusPerNode: 0"),
        {"gpusPerNode": 1}),
    ClusterFault("taint", "all Nodes are tainted", waits("Unschedulable", "maintenance", "tolerat|taint"), before=_taint, after=_untaint),
    ClusterFault("quota", "a quota forbids the second pod", waits("PodsRefused", "quota", "quota"), before=_quota, after=_no_quota),
    ClusterFault("priority", "the PriorityClass is missing", waits("PodsRefused", "none-such", "PriorityClass|priorityClass|priority"),
        {"podTemplate": {"priorityClassName": "none-such"}}),
    ClusterFault("no-class", "the storage class is missing", waits("ClaimNotBound", "lockstep-no-such-class", "class"),
        before=cluster_like_local(_no_class), after=no_such_cluster),
    ClusterFault("name-taken", "somebody's Service has the job's name", refused("NameTaken", "headless", "delete|another name|rename"),
        before=_service_of_somebody, after=_no_service_of_somebody),
    ClusterFault("no-script", "the script isn't on the volume",
        expect("Configuration", "/workspace/train.py", "put it there|change what the message names", node=0),
            {"script": {"path": "/workspace/train.py"}}),
    ClusterFault("no-dns", "the cluster's DNS is away", expect("DNSUnavailable", "DNS|name", "DNS|dns", state="Waiting"),
        before=_resolver(signal.SIGSTOP), after=_resolver(signal.SIGCONT)),
    ClusterFault("deadline", "the job's time is up",
        expect("DeadlineExceeded", "activeDeadlineSeconds|deadline", "activeDeadlineSeconds|deadline"), {"activeDeadlineSeconds": 20},
            seconds=90.0),
    ClusterFault("raises", "a rank raises an exception", expect("UserCode", "ValueError: bad label", "correct it first", rank=1, node=1),
        script=FAILS),
    ClusterFault("hangs", "a rank is stopped", expect("Hang", "is stopped", "stacks", rank=1, node=1), {"hangTimeouts": {"stepSeconds": 5}},
        script=HANGS),
    ClusterFault("memory", "a rank takes more memory than its pod may",
        expect("OutOfMemory", "its limit of 256 MiB", "resources.limits.memory", rank=1, node=1), {"resources": {"memory": "256Mi"}},
            script=EATS),
    ClusterFault("partition", "two pods can't talk to each other",
        expect("NodeNotHeard", "node 1 .*not been heard", "Nodes of the pods that can't talk", state="NodeNotHeard"), act=_cut,
            seconds=25.0),
    ClusterFault("partition-lasts", "two pods can't talk for longer than a node is waited for",
        expect("NodeLost", "network between the two", "network|node", node=1), act=_cut, seconds=120.0),
    ClusterFault("pod-agent-frozen", "an agent gets no CPU", expect("NodeLost", "stopped or gets no CPU", "node", node=1),
        act=_signal(1, signal.SIGSTOP), seconds=120.0),
    ClusterFault("pod-agent-killed", "an agent is killed", expect("NodeLost", "node 1", "node", node=1), act=_signal(1, signal.SIGKILL)),
    ClusterFault("coordinator-killed", "the agent with the coordinator is killed", expect("NodeLost", "node 0", "node", node=0),
        act=_signal(0, signal.SIGKILL)),
    ClusterFault("pod-deleted", "a pod is deleted", expect("NodeLost", "was deleted", "logs", node=1, state="Running"),
        act=delete("Pod", "{}-1"), seconds=120.0),
    ClusterFault("pod-force-deleted", "a pod is deleted by force", expect("NodeLost", "was deleted", "logs", node=1, state="Running"), ONCE,
        act=_delete_pod_now, seconds=120.0),
    ClusterFault("evicted", "a pod is evicted, as a drain does it", expect("NodeLost", "was evicted", "logs", node=1, state="Running"),
        act=evict, seconds=120.0),
    ClusterFault("scaled", "somebody scales the StatefulSet",
        expect("NodeLost", "was scaled to 1", "lockstep scale", node=1, state="Running"), ONCE, act=_scaled_by_hand, seconds=120.0),
    ClusterFault("set-deleted", "somebody deletes the StatefulSet", expect("", "StatefulSet", "", state="Running"), ONCE,
        act=delete("StatefulSet", "{}", "apps/v1"), seconds=120.0),
    ClusterFault("service-deleted", "somebody deletes the Service", expect("", "Service .*creates it again", "logs", state="Running"),
        act=delete("Service", "{}-headless")),
    ClusterFault("key-deleted", "somebody deletes the Secret with the agents' key", expect("", "", "", state="Running"), act=_key_is_gone,
        seconds=20.0),
    ClusterFault("no-operator", "the operator is away", expect("", "operator", "lockstep doctor", state="Running"), act=_no_operator,
        after=_operator_again, seconds=120.0),
    ClusterFault("small-mtu", "large packets get lost between two pods", expect("Hang", BOTH_WAIT, "stacks"), PATIENT, TALKS,
        act=_no_large_packets, seconds=90.0),
    ClusterFault("closed-ports", "a firewall lets only the coordinator's port through",
        expect("Fabric", "can't reach node", "firewalls", node=0), {}, TALKS, meanwhile=_only_agents_talk, seconds=150.0),
    ClusterFault("no-config-map", "a ConfigMap of podTemplate.volumes is missing",
        waits("VolumeNotMounted", "none-such", "kubectl create configmap none-such"),
            {"podTemplate": {"volumes": [{"name": "script", "mountPath": "/scripts", "configMap": {"name": "none-such"}}]}}, seconds=90.0),
    ClusterFault("no-pull-secret", "a Secret of imagePullSecrets is missing",
        waits("ImagePullFailed", "none-such", "kubectl create secret docker-registry none-such"),
            {"image": NO_IMAGE, "imagePullSecrets": [{"name": "none-such"}]}, seconds=90.0),
    ClusterFault("limit-range", "a LimitRange allows less memory than a pod asks for",
        waits("PodsRefused", "LimitRange|maximum memory", "limitrange|LimitRange|resources"),
            before=both(cluster_like_local(_much_memory),
                made({"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small"},
                    "spec": {"limits": [{"type": "Container", "max": {"memory": "64Mi"}}]}})),
                        after=both(delete("LimitRange", "small"), no_such_cluster)),
    ClusterFault("webhook", "an admission webhook doesn't answer", waits("PodsRefused", "pods.example.com", "webhook"),
        before=_webhook_of_nobody, after=_no_webhook),
    ClusterFault("cordoned", "all Nodes are cordoned", waits("Unschedulable", "cordon", "uncordon"), before=nodes({"unschedulable": True}),
        after=nodes({"unschedulable": None})),
    ClusterFault("many-nodes", "the job wants more nodes than there are", waits("Unschedulable", "one node per pod", "lockstep scale"),
        {"nodes": 3}),
    ClusterFault("scheduler", "the scheduler is away", waits("Scheduling", "scheduler", "scheduler"),
        before=_daemon("kube-scheduler", signal.SIGSTOP), after=_daemon("kube-scheduler", signal.SIGCONT), seconds=90.0),
    ClusterFault("controllers", "the controllers of Kubernetes are away", waits("PodsNotCreated", "kube-controller-manager", "kube-system"),
        before=_daemon("kube-controller-manager", signal.SIGSTOP), after=_daemon("kube-controller-manager", signal.SIGCONT), seconds=90.0),
    ClusterFault("drain-taint", "a Node gets a NoExecute taint",
        expect("NodeLost", "was evicted: Taint manager", "podTemplate.tolerations", node=1, state="Restarting"), act=_drain_taint,
            after=_untaint, seconds=90.0),
    ClusterFault("labels", "somebody takes a pod's labels away", waits("PodsNotCreated", "labels-1", "--show-labels"), ONCE,
        act=_labels_gone, seconds=120.0),
    ClusterFault("template", "somebody changes the StatefulSet's template", expect("", "", "", state="Running"), ONCE,
        act=_template_changed, seconds=30.0),
    ClusterFault("other-selector", "somebody changes the Service's selector", expect("", "", "", state="Running"), ONCE,
        act=_other_selector, seconds=30.0),
    ClusterFault("finalizer", "a finalizer keeps a deleted pod",
        expect("NodeLost", "example.com/keeps", "finalizers", node=1, state="Restarting"), ONCE, act=_finalizer, after=_no_finalizer,
            seconds=120.0),
    ClusterFault("cluster-deleted", "the job's TrainingCluster is deleted while it runs",
        expect("ClusterNotFound", "TrainingCluster|spec.cluster", "lockstep deploy", state="Running"), act=no_such_cluster,
            before=cluster_like_local(lambda _: None), seconds=60.0),
    ClusterFault("rank-killed", "somebody kills a rank", expect("Killed", "SIGKILL", "find out who did", rank=1, node=1), act=_kill_rank),
)  # fmt: skip
