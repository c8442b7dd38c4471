"""Clusters as their owners' public manifests and guides describe them: what `discover` writes renders the rails of those manifests, and
says what it leaves out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from golden.plan_cases import CONTEXT, job, of_kind, trainer_of, variables_of
from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.plan.checks.lint import lint_against
from lockstep.plan.cluster.facts import NETWORK, ClusterFacts, Listing, ProbeFacts, Sight
from lockstep.plan.cluster.finding import Outcome
from lockstep.plan.discovery.file import discovered
from lockstep.plan.discovery.rails import cluster_hardware, unused
from lockstep.plan.render.objects import render
from lockstep.plan.render.resolve import resolve

CLUSTERS = sorted(Path(__file__).parent.glob("*.yaml"))


def network(name: str, namespace: str = "ml", resource: str = "", config: Any = None, plugins: Any = None) -> dict[str, Any]:
    annotations = {"k8s.v1.cni.cncf.io/resourceName": resource} if resource else {}
    body = {"cniVersion": "1.0.0", "name": name} | (config or {"plugins": plugins})
    return {"metadata": {"name": name, "namespace": namespace, "annotations": annotations}, "spec": {"config": json.dumps(body)}}


def node(name: str, case: dict[str, Any]) -> dict[str, Any]:
    allocatable = {"cpu": "96", "memory": "1000Gi", "pods": "110"} | {key: str(value) for key, value in case["node"].items()}
    labels = {"kubernetes.io/hostname": name, **case.get("labels", {})}
    status = {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": name, "labels": labels}, "spec": {}, "status": status}


def facts_of(case: dict[str, Any]) -> ClusterFacts:
    networks = [network(**item) for item in case.get("networks", [])]
    policies = [{"metadata": {"name": f"policy-{one['resourceName']}"}, "spec": one} for one in case.get("policies", [])]
    lists = {
        "Node": Listing("Node", (node("n0", case), node("n1", case))),
        NETWORK: Listing(NETWORK, tuple(item for item in networks if item["metadata"]["namespace"] == "ml")),
        "SriovNetworkNodePolicy": Listing("SriovNetworkNodePolicy", tuple(policies)),
    }
    lists |= {kind: Listing(kind, sight=Sight.NO_SUCH_KIND) for kind in case.get("no_kinds", [])}
    lists |= {kind: Listing(kind, sight=Sight.FORBIDDEN) for kind in case.get("forbidden", [])}
    elsewhere = {"default": Listing(NETWORK, tuple(item for item in networks if item["metadata"]["namespace"] == "default"))}
    probes = (ProbeFacts("n0", hcas=case["probes"]),) if "probes" in case else ()
    return ClusterFacts("ml", "https://10.0.0.1:6443", lists=lists, networks_elsewhere=elsewhere, probes=probes)


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_discovered_file_renders_the_rails_of_the_owners_manifests(path: Path) -> None:
    case = yaml.safe_load(path.read_text(encoding="utf-8"))
    facts, answer = facts_of(case), case["answer"]
    text, _ = discovered("theirs", facts)
    file = parse_cluster_file(text, path.name)
    spec = file.profile.spec
    enabled = answer.get("enabled", True)
    assert (spec.gpus.per_node, spec.network.mtu, spec.network.rdma.enabled) == (answer["gpus"], answer.get("mtu"), enabled), text
    plain = " ".join(text.replace("#", " ").split())
    assert [words for words in answer.get("file", []) if words not in plain] == []

    made = render(resolve(job(image="trainer:1", gpusPerNode=spec.gpus.per_node), file.profile), CONTEXT)
    limits = {
        key: value
        for key, value in trainer_of(made).get("resources", {}).get("limits", {}).items()
        if "/" in key and key != "nvidia.com/gpu"
    }
    annotation = (of_kind(made, "StatefulSet")[0]["spec"]["template"]["metadata"].get("annotations") or {}).get(
        "k8s.v1.cni.cncf.io/networks"
    )
    expected = answer.get("networks") and ",".join([answer["networks"]] * answer.get("count", 1))
    assert (limits, annotation) == (answer["limits"], expected)
    variables = {name: value for name, value in variables_of(made).items() if name.startswith(("FI_", "NCCL_IB"))}
    assert variables == answer.get("variables", {} if enabled or not spec.gpus.per_node else {"NCCL_IB_DISABLE": "1"})

    report = [f"{one.subject}: {one.message}" for one in unused(spec, cluster_hardware(facts, spec))]
    assert [words for words in answer.get("unused", []) if not any(words in line for line in report)] == [], report
    assert enabled is False or not any(line.startswith("network.rdma") for line in report), report
    problems = [
        one for one in lint_against(file, facts) if one.outcome is Outcome.FAILED and one.subject.startswith(("network", "gpus", "nodes"))
    ]
    assert problems == []
