"""What `lockstep doctor` makes of a cluster: every finding says what is wrong and what to do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.api.files.clusterfile import ClusterFile, parse_cluster_file
from lockstep.kube.cluster import Client
from lockstep.kube.kinds import path_of
from lockstep.plan.checks.doctor import examine, ready_endpoints
from lockstep.plan.cluster.facts import NETWORK, ClusterFacts, Listing, Sight
from lockstep.plan.cluster.finding import Finding, Outcome
from lockstep.platforms.clusters.facts import doctor_facts, network_facts
from support.api_stub import ApiStub, served
from support.checkout import ROOT

CRDS = {crd["metadata"]["name"]: crd for crd in (yaml.safe_load(path.read_text()) for path in (ROOT / "manifests/crds").glob("*.yaml"))}


def cluster_file(**changes: Any) -> ClusterFile:
    """The file of an RDMA cluster with two nodes of four GPUs and one rail."""
    stated: dict[str, Any] = {
        "cluster": {"name": "c", "namespace": "ns"},
        "nodes": {"gpu_nodes": ["a", "b"]},
        "storage": {"mode": "rwx", "class_rwx": "nfs"},
        "network": {"rdma": {"enabled": True, "rails": [{"network": "rail1", "resource": "x.com/rail1"}]}},
        "security": {"ipc_lock": True},
        "gpus": {"per_node": 4, "default_nodes": 2},
    }
    return parse_cluster_file(yaml.safe_dump(stated | changes), "c.yaml")


def node(name: str, gpus: int = 4, ready: str = "True", rails: int = 1, product: str = "H100", **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, "nvidia.com/gpu.product": product}},
        "spec": spec,
        "status": {
            "conditions": [{"type": "Ready", "status": ready}],
            "allocatable": {"nvidia.com/gpu": str(gpus), "x.com/rail1": str(rails)},
        },
    }


def claim(name: str, phase: str = "Bound", mode: str = "ReadWriteMany") -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"accessModes": [mode]}, "status": {"phase": phase, "capacity": {"storage": "1Ti"}}}


def operator(image: str = "r.example.com/lockstep-operator:1", namespaces: str = "") -> dict[str, Any]:
    container = {"image": image, "env": [{"name": "LOCKSTEP_NAMESPACES", "value": namespaces}]}
    return {
        "metadata": {"name": "lockstep-operator", "namespace": "lockstep-system"},
        "spec": {"replicas": 2, "template": {"spec": {"containers": [container]}}},
        "status": {"readyReplicas": 2},
    }


def network(namespace: str) -> dict[str, Any]:
    return {"metadata": {"name": "rail1", "namespace": namespace}}


def endpoints(service: str, *ready: bool | None) -> dict[str, Any]:
    metadata = {"name": f"{service}-abc", "labels": {"kubernetes.io/service-name": service}}
    return {"metadata": metadata, "endpoints": [{"conditions": {} if one is None else {"ready": one}} for one in ready]}


def healthy(found: ClusterFile) -> ClusterFacts:
    lists = {
        "CustomResourceDefinition": tuple(CRDS.values()),
        "Node": (node("a"), node("b")),
        "StorageClass": ({"metadata": {"name": "nfs"}, "provisioner": "nfs.csi.k8s.io"},),
        "PersistentVolumeClaim": (claim("ml-dev-workspace"),),
        NETWORK: (network("ns"),),
        "EndpointSlice": (endpoints("kube-dns", True, True),),
    }
    objects = {
        ("Deployment", "lockstep-operator"): operator(),
        ("TrainingCluster", "c"): {"spec": found.profile.spec.to_dict()},
        ("ServiceAccount", "ml-dev-sa"): {"metadata": {"name": "ml-dev-sa"}},
    }
    return ClusterFacts(
        namespace="ns",
        rights={"create TrainingJobs": True},
        lists={kind: Listing(kind, items) for kind, items in lists.items()},
        objects={key: Listing(key[0], (item,)) for key, item in objects.items()},
    )


NAMED: dict[str, tuple[str, str]] = {
    "deployment": ("Deployment", "lockstep-operator"), "profile": ("TrainingCluster", "c"), "account": ("ServiceAccount", "ml-dev-sa"),
}  # fmt: skip
KINDS = {
    "crds": "CustomResourceDefinition", "nodes": "Node", "classes": "StorageClass", "claims": "PersistentVolumeClaim", "networks": NETWORK,
    "dns": "EndpointSlice",
}  # fmt: skip


def findings(found: ClusterFile | None = None, **changes: Any) -> list[Finding]:
    """Of the healthy cluster with changes. Lists: their items, or how they were answered; single objects likewise, None where it isn't
    there.
    """
    stated = found or cluster_file()
    facts = healthy(stated)
    lists, objects = dict(facts.lists), dict(facts.objects)
    for name in KINDS.keys() & changes.keys():
        value = changes.pop(name)
        lists[KINDS[name]] = Listing(KINDS[name], sight=value) if isinstance(value, Sight) else Listing(KINDS[name], tuple(value))
    for name in NAMED.keys() & changes.keys():
        value, key = changes.pop(name), NAMED[name]
        objects[key] = Listing(key[0], sight=value) if isinstance(value, Sight) else Listing(key[0], () if value is None else (value,))
    return list(examine(stated, dataclasses.replace(facts, lists=lists, objects=objects, **changes), CRDS))


HIDDEN = Sight.FORBIDDEN


def test_a_healthy_cluster_has_nothing_to_mend() -> None:
    found = findings()
    assert {finding.outcome for finding in found} == {Outcome.OK} and not any(finding.fix for finding in found)
    assert {finding.subject for finding in found} == {
        "rights", "CRDs", "operator", "cluster", "image", "service account", "DNS", "nodes", "storage", "claims", "fabric"
    }  # fmt: skip


OLD_SCHEMA = {"openAPIV3Schema": {"properties": {"spec": {"type": "object"}}}}
OLD_CRDS = [{"metadata": {"name": name}, "spec": {"versions": [{"schema": OLD_SCHEMA}]}} for name in CRDS]
DOWN = {**operator(), "status": {}}


TAINT = {"key": "dedicated", "value": "infra", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("image", "verdict", "said"),
    [
        ("r.example.com/lockstep-operator:1", "ok", "jobs without an image run r.example.com/lockstep-trainer:1, from the operator's"),
        ("r.example.com/mine:1", "warning", "jobs without an image are refused: the operator's image r.example.com/mine:1 isn't called"),
    ],
)
def test_of_a_cluster_without_an_image_it_is_said_which_one_jobs_get(image: str, verdict: str, said: str) -> None:
    (found,) = [one for one in findings(deployment=operator(image)) if one.subject == "image"]
    assert found.outcome.value == verdict and said in found.message
    assert not [one for one in findings(cluster_file(image="trainer:1")) if one.subject == "image"]
    assert not [one for one in findings(deployment=None) if one.subject == "image"]


@pytest.mark.parametrize(
    ("changes", "verdict", "said"),
    [
        ({"rights": {"create pods": False, "create claims": True}}, "failed", "you may not create pods in namespace ns"),
        ({"crds": ()}, "failed", "not installed"),
        ({"crds": OLD_CRDS}, "warning", "of another version than this lockstep's"),
        ({"crds": HIDDEN}, "unknown", "TrainingJobs are known here; of which version, you may not see"),
        ({"crds": HIDDEN, "jobs": Sight.NO_SUCH_KIND}, "failed", "this cluster doesn't know TrainingJobs"),
        ({"deployment": operator(namespaces="a")}, "failed", "none works in namespace ns"),
        ({"deployment": None}, "failed", "not installed"),
        ({"deployment": HIDDEN}, "unknown", "you may not look into namespace"),
        ({"deployment": DOWN}, "failed", "0 of 2 replicas ready"),
        ({"profile": None}, "failed", "TrainingCluster c is not on the cluster"),
        ({"profile": {"spec": {"gpus": {"perNode": 8}}}}, "warning", "differs from its file in"),
        ({"account": None}, "failed", "ServiceAccount ml-dev-sa (the cluster's security.service_account) is not in namespace ns"),
        ({"dns": HIDDEN}, "unknown", "you may not look at the endpoints of kube-system/kube-dns or openshift-dns/dns-default"),
        ({"dns": ()}, "unknown", "there is neither kube-system/kube-dns nor openshift-dns/dns-default"),
        ({"dns": (endpoints("dns-default"),)}, "failed", "openshift-dns/dns-default has no ready endpoint"),
        ({"nodes": HIDDEN}, "unknown", "you may not list Node objects"),
        ({"nodes": (node("a"), node("b", ready="Unknown"))}, "warning", "node b is not Ready"),
        ({"nodes": (node("a"), node("b", unschedulable=True))}, "warning", "node b is cordoned"),
        (
            {"nodes": (node("a"), node("b", taints=[TAINT]))},
            "warning",
            "node b has the taint dedicated=infra:NoSchedule, which is not tolerated",
        ),
        ({"nodes": (node("a"), node("b", gpus=3))}, "failed", "1 of the 2 nodes that the cluster allows can take its pods"),
        ({"nodes": (node("a"), node("b", gpus=3))}, "warning", "node b has 3 of 4 GPUs"),
        ({"classes": ({"metadata": {"name": "ceph"}},)}, "failed", "storage.class_rwx: there is no storage class nfs"),
        (
            {"claims": (claim("ml-dev-workspace", mode="ReadWriteOnce"),)},
            "failed",
            "ml-dev-workspace is ReadWriteOnce: 2 nodes can't mount it",
        ),
        ({"claims": (claim("ml-datasets", phase="Pending"),)}, "warning", "ml-datasets is Pending"),
        ({"networks": ()}, "failed", "there is no NetworkAttachmentDefinition rail1 in namespace ns"),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], verdict: str, said: str) -> None:
    assert any(finding.outcome.value == verdict and said in finding.message for finding in findings(**changes)), findings(**changes)


@pytest.mark.parametrize(("claims", "judged"), [((), []), ((claim("ml-datasets"),), ["claim ml-datasets is Bound, 1Ti, ReadWriteMany"])])
def test_a_storage_class_that_is_missing_is_said_once(claims: tuple[dict[str, Any], ...], judged: list[str]) -> None:
    found = findings(classes=({"metadata": {"name": "ceph"}},), claims=claims)
    assert [one.message for one in found if one.outcome is Outcome.FAILED] == ["storage.class_rwx: there is no storage class nfs"]
    assert [one.message for one in found if one.subject == "claims"] == judged


COPY = (
    "kubectl get net-attach-def rail1 -n theirs -o yaml | sed -E '/^  (namespace|uid|resourceVersion|creationTimestamp|generation):/d' "
    "| kubectl apply -n ns -f -"
)


def slices(namespace: str, service: str, *ready: bool | None) -> dict[str, Any]:
    return {path_of("EndpointSlice", namespace): {"metadata": {}, "items": [endpoints(service, *ready)]}}


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (ApiStub(slices("kube-system", "kube-dns", True, None, False)), {"kube-system/kube-dns": 2}),
        (ApiStub(slices("openshift-dns", "dns-default")), {"openshift-dns/dns-default": 0}),
        (ApiStub(), {}),
        (ApiStub(forbidden={"endpointslices"}), None),
    ],
)
def test_the_ready_endpoints_of_the_cluster_s_dns_are_counted(
    there: ApiStub, expected: dict[str, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(there, tmp_path) as path:
        monkeypatch.setenv("KUBECONFIG", str(path))
        facts = Client().run(lambda cluster: doctor_facts(cluster, cluster_file(), "ns"))
    listing = facts.list("EndpointSlice")
    assert (ready_endpoints(listing.items) if listing.seen else None) == expected


def test_what_fails_comes_with_what_to_do() -> None:
    wrong = findings(crds=(), deployment=None, profile=None, account=None, classes=())
    assert all(finding.fix for finding in wrong if finding.outcome is Outcome.FAILED)


def test_without_a_class_the_cluster_s_default_counts() -> None:
    found = cluster_file(storage={"mode": "volumeClaimTemplates"})
    default = {"metadata": {"name": "gp3", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}}
    said = [finding.message for finding in findings(found, classes=(default,))]
    assert "storage.class_rwo: no class is set, so claims get the default class gp3" in said
    assert any("has no default class" in finding.message for finding in findings(found, classes=({"metadata": {"name": "gp3"}},)))


OWN = "networks belong to a namespace: an administrator makes one for each rail in yours"


@pytest.mark.parametrize(("there", "fix"), [((), OWN), (("theirs",), COPY)])
def test_a_rail_that_another_namespace_has_is_copied_from_there(
    there: tuple[str, ...], fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "NetworkAttachmentDefinition"
    listed = {path_of(kind, None): {"metadata": {}, "items": [network(namespace) for namespace in there]}}
    with served(ApiStub({path_of(kind, "ns"): {"metadata": {}, "items": []}, **listed}), tmp_path) as path:
        monkeypatch.setenv("KUBECONFIG", str(path))
        facts = Client().run(lambda cluster: network_facts(cluster, cluster_file().profile.spec, "ns"))
    found = findings(networks=facts.list(NETWORK).items, networks_elsewhere=facts.networks_elsewhere)
    assert [finding.fix for finding in found if "rail1 in namespace ns" in finding.message] == [fix]


def test_rdma_without_rails_is_a_warning() -> None:
    found = cluster_file(network={"rdma": {"enabled": True}})
    assert any(finding.outcome is Outcome.WARNING and "RDMA without rails" in finding.message for finding in findings(found))


def test_a_right_to_what_the_cluster_does_not_know_yet_is_no_right_that_a_person_lacks() -> None:
    """RBAC has no rule for a kind before its definition is there; another role would not help."""
    rights = {"create TrainingJobs": False, "create pods": True}
    found = findings(rights=rights, crds=HIDDEN, jobs=Sight.NO_SUCH_KIND)
    assert [one.message for one in found if one.subject == "rights"] == ["you may create pods in namespace ns"]
    (definitions,) = [one for one in found if one.subject == "CRDs"]
    assert definitions.fix == "lockstep deploy c; without the rights for that, it prints what an administrator types"


def test_what_may_not_be_read_is_unknown_and_not_missing() -> None:
    hidden = {finding.subject: finding for finding in findings(profile=HIDDEN, account=HIDDEN)}
    for subject in ("cluster", "service account"):
        assert (hidden[subject].outcome, hidden[subject].fix) == (Outcome.UNKNOWN, "")
        assert hidden[subject].message.endswith("your account may not read it")
    assert not any(finding.outcome is Outcome.FAILED for finding in hidden.values())
    assert {finding.subject for finding in findings(profile=None, account=None) if finding.outcome is Outcome.FAILED} == {
        "cluster",
        "service account",
    }
    assert next(finding for finding in findings(crds=HIDDEN, jobs=HIDDEN) if finding.subject == "CRDs").outcome is Outcome.UNKNOWN
