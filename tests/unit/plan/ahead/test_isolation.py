"""A rail's network in another namespace: OpenShift's Multus keeps namespaces apart, and lint, doctor and plan say so before pods wait for
ever.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from golden.plan_cases import job, profile
from lockstep.api.files.clusterfile import ClusterFile, parse_cluster_file
from lockstep.plan.checks.doctor import examine
from lockstep.plan.checks.lint import lint_against
from lockstep.plan.checks.needs import reference_findings
from lockstep.plan.cluster.facts import ClusterFacts, Listing
from lockstep.plan.cluster.finding import Finding, Outcome
from lockstep.plan.discovery.file import discovered
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults
from support.cluster_facts import network, rail, rdma_cluster

COPY = (
    "an administrator: kubectl get net-attach-def eno5np0-network -n theirs -o yaml "
    "| sed -E '/^  (namespace|uid|resourceVersion|creationTimestamp|generation):/d' | kubectl apply -n nccl-test -f -; "
    "then write network: eno5np0-network"
)
NAMED = [
    ("theirs/eno5np0-network", "openshift", True),
    ("theirs/eno5np0-network", "kubernetes", False),
    ("default/eno5np0-network", "openshift", False),
    ("openshift-sriov-network-operator/eno5np0-network", "openshift", False),
    ("nccl-test/eno5np0-network", "openshift", False),
    ("eno5np0-network", "openshift", False),
]
SAID = "OpenShift's Multus (namespace isolation) gives it to no pod of namespace nccl-test: pods stay in ContainerCreating"


def cluster_file(first: str, platform: str) -> ClusterFile:
    """The RDMA cluster's file, with the first rail's network under another name."""
    stated: dict[str, Any] = yaml.safe_load(discovered("c", rdma_cluster())[0])
    stated["network"]["rdma"]["rails"][0]["network"] = first
    stated["cluster"]["platform"] = platform
    return parse_cluster_file(yaml.safe_dump(stated), "c.yaml")


def linted(first: str, platform: str, *networks: dict[str, Any]) -> list[Finding]:
    facts = rdma_cluster(NetworkAttachmentDefinition=(*map(rail, (6, 7, 8)), *networks))
    return [one for one in lint_against(cluster_file(first, platform), facts) if one.subject == "network.rdma.rails[0].network"]


@pytest.mark.parametrize(("first", "platform", "warned"), NAMED)
def test_lint_warns_of_a_network_that_pods_of_the_namespace_can_not_have(first: str, platform: str, warned: bool) -> None:
    there = network("eno5np0-network", first.rpartition("/")[0] or "nccl-test", resource="openshift.io/eno5np0rdma", mtu=9000)
    found = linted(first, platform, there)
    assert [(one.outcome, SAID in one.message, one.fix) for one in found] == ([(Outcome.WARNING, True, COPY)] if warned else [])


@pytest.mark.parametrize(("platform", "advised"), [("kubernetes", True), ("openshift", False)])
def test_to_name_a_network_of_another_namespace_is_advised_only_where_it_works(platform: str, advised: bool) -> None:
    (missing,) = linted("eno5np0-network", platform)
    assert ("or name it as namespace/name" in missing.fix) is advised


@pytest.mark.parametrize(("first", "platform", "warned"), NAMED)
def test_doctor_warns_of_it_too(first: str, platform: str, warned: bool) -> None:
    found = [one for one in examine(cluster_file(first, platform), rdma_cluster(), {}) if one.subject == "fabric" and SAID in one.message]
    assert [(one.outcome, SAID in one.message, one.fix) for one in found] == ([(Outcome.WARNING, True, COPY)] if warned else [])


@pytest.mark.parametrize(("platform", "doubted"), [("OpenShift", True), ("Kubernetes", False)])
def test_a_plan_doubts_that_such_a_job_starts(platform: str, doubted: bool) -> None:
    rdma = {"enabled": True, "rails": [{"network": "theirs/eno5np0-network", "resource": "x.com/y"}]}
    given = profile(platform=platform, network={"rdma": rdma}, security={"ipcLock": True}, gpus={"perNode": 4}, image="trainer:1")
    resolved = resolve(job(nodes=2), given, PlatformDefaults(namespace="nccl-test"))
    account = Listing("ServiceAccount", ({"metadata": {"name": "ml-dev-sa"}},))
    found = list(reference_findings(resolved, ClusterFacts("nccl-test", objects={("ServiceAccount", "ml-dev-sa"): account})))
    assert [SAID in one.message for one in found if one.outcome is Outcome.UNKNOWN] == ([True] if doubted else [])
