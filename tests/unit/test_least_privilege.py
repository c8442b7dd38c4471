"""No pod that Lockstep makes is privileged, and nobody is told to let one be; the guide's example of a cluster gives pods their NICs all the same."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster_facts import SCCS, rdma_cluster
from golden.plan_cases import job
from lockstep.api.clusterfile import ClusterFile, parse_cluster_file
from lockstep.api.names import ANNOTATION_NETWORKS
from lockstep.cli.deploy import Mode, planned
from lockstep.cli.deployed import tell_end
from lockstep.plan.discovery.file import discovered
from lockstep.plan.lint.alone import lint_alone
from lockstep.plan.lint.cluster import lint_against
from lockstep.plan.objects import render
from lockstep.plan.resolve import PlatformDefaults, resolve

ROOT = Path(__file__).resolve().parents[2]
PRIVILEGED: dict[str, Any] = {"metadata": {"name": "privileged"}, "allowedCapabilities": ["*"], "runAsUser": {"type": "RunAsAny"}}
OWN = "an administrator: lockstep deploy brings one that allows nothing else"


def old_file(platform: str = "openshift") -> ClusterFile:
    stated: dict[str, Any] = yaml.safe_load(discovered("c", rdma_cluster())[0])
    stated["security"]["requires_privileged_scc"] = True
    stated["cluster"]["platform"] = platform
    return parse_cluster_file(yaml.safe_dump(stated), "c.yaml")


@pytest.mark.parametrize("platform", ["openshift", "kubernetes"])
def test_lint_says_of_an_old_file_that_the_key_has_no_effect(platform: str) -> None:
    assert [(one.key, one.verdict.value, one.said) for one in lint_alone(old_file(platform))] == [
        ("security.requires_privileged_scc", "warning", "it has no effect: no pod that Lockstep makes is privileged")
    ]


def test_deploy_says_so_and_prints_no_grant(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned("barcelona", Mode.RDMA)
    tell_end(dataclasses.replace(plan, profile=old_file().profile), dev=True, complete=False)
    told = capsys.readouterr().out
    assert "security.requires_privileged_scc has no effect" in told and "add-scc-to-user" not in told


def test_a_discovered_file_does_not_have_the_key() -> None:
    assert "requires_privileged_scc" not in discovered("c", rdma_cluster())[0]


@pytest.mark.parametrize(
    ("sccs", "fix"),
    [
        ((PRIVILEGED,), OWN),
        ((PRIVILEGED, *SCCS), "an administrator: oc adm policy add-scc-to-user nccl-scc -z ml-dev-sa -n nccl-test"),
        ((), OWN),
    ],
)
def test_an_scc_that_allows_everything_is_never_advised(sccs: tuple[dict[str, Any], ...], fix: str) -> None:
    facts = dataclasses.replace(rdma_cluster(SecurityContextConstraints=sccs), may_use_scc={"privileged": False, "nccl-scc": False})
    found = parse_cluster_file(discovered("c", rdma_cluster())[0], "c.yaml")
    assert [one.fix for one in lint_against(found, facts) if one.key.startswith("security.")] == [fix]


def test_a_pod_of_the_guide_s_cluster_gets_a_network_and_a_device_for_each_interface_that_nccl_is_told_of() -> None:
    (text,) = re.findall(r"```yaml\n(cluster:\n.*?)```", (ROOT / "docs/how-to/multi-node-guide.md").read_text(), re.DOTALL)
    found = parse_cluster_file(text, "my-cluster.yaml")
    assert list(lint_alone(found)) == []
    resolved = resolve(job(fabric={"mode": "RDMA"}), found.profile, PlatformDefaults(namespace="nccl-test", image="trainer:1"))
    (stateful_set,) = [item for item in render(resolved) if item["kind"] == "StatefulSet"]
    pod = stateful_set["spec"]["template"]
    (trainer,) = pod["spec"]["containers"]
    told = {variable["name"]: variable.get("value", "") for variable in trainer["env"]}["NCCL_SOCKET_IFNAME"].split(",")
    devices = [name for name in trainer["resources"]["limits"] if name.startswith("openshift.io/")]
    assert len(pod["metadata"]["annotations"][ANNOTATION_NETWORKS].split(",")) == len(devices) == len(told) == 4
