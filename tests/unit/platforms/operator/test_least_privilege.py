"""No pod that Lockstep makes is privileged, and nobody is told to let one be; the guide's example of a cluster gives pods their NICs all
the same.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import yaml

from golden.plan_cases import job
from lockstep.api.files.clusterfile import ClusterFile, parse_cluster_file
from lockstep.api.names import ANNOTATION_NETWORKS
from lockstep.cli.clusters.deploy import tell_end, warn_of
from lockstep.cli.clusters.deploymentplan import Mode, planned
from lockstep.cli.shared.places import Verb
from lockstep.plan.checks.alone import lint_alone
from lockstep.plan.checks.lint import lint_against
from lockstep.plan.cluster.finding import Outcome
from lockstep.plan.discovery.file import discovered
from lockstep.plan.discovery.probe import probe_pods
from lockstep.plan.render.objects import render
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults
from lockstep.platforms.clusters.install import kustomized
from support.checkout import ROOT
from support.cluster_facts import SCCS, rdma_cluster

PRIVILEGED: dict[str, Any] = {"metadata": {"name": "privileged"}, "allowedCapabilities": ["*"], "runAsUser": {"type": "RunAsAny"}}
OPERATOR = "lockstep-operator:0.1.0"
OWN = "an administrator: lockstep deploy brings one that allows nothing else"


def old_file(platform: str = "openshift") -> ClusterFile:
    stated: dict[str, Any] = yaml.safe_load(discovered("c", rdma_cluster())[0])
    stated["security"]["requires_privileged_scc"] = True
    stated["cluster"]["platform"] = platform
    return parse_cluster_file(yaml.safe_dump(stated), "c.yaml")


@pytest.mark.parametrize("platform", ["openshift", "kubernetes"])
def test_lint_says_of_an_old_file_that_the_key_has_no_effect(platform: str) -> None:
    found = [one for one in lint_alone(old_file(platform), OPERATOR) if one.outcome not in (Outcome.OK, Outcome.UNKNOWN)]
    assert [(one.subject, one.outcome.value, one.message) for one in found] == [
        ("security.requires_privileged_scc", "warning", "it has no effect: no pod that Lockstep makes is privileged")
    ]


def test_deploy_says_so_and_prints_no_grant(capsys: pytest.CaptureFixture[str]) -> None:
    old = old_file()
    plan = dataclasses.replace(planned(Verb(), "barcelona", Mode.RDMA), cluster=old, profile=old.profile)
    warn_of(plan)
    tell_end(plan, dev=True, complete=False)
    printed = capsys.readouterr()
    assert "security.requires_privileged_scc: it has no effect" in printed.err and "add-scc-to-user" not in printed.out + printed.err


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
    assert [one.fix for one in lint_against(found, facts) if one.subject.startswith("security.")] == [fix]


def test_a_pod_of_the_guide_s_cluster_gets_a_network_and_a_device_for_each_interface_that_nccl_is_told_of() -> None:
    (text,) = re.findall(r"```yaml\n(cluster:\n.*?)```", (ROOT / "docs/how-to/multi-node-guide.md").read_text(), re.DOTALL)
    found = parse_cluster_file(text, "my-cluster.yaml")
    assert [one.subject for one in lint_alone(found, OPERATOR)] == ["calibration"], "nobody has measured it"
    resolved = resolve(job(fabric={"mode": "RDMA"}), found.profile, PlatformDefaults(namespace="nccl-test", image="trainer:1"))
    (stateful_set,) = [item for item in render(resolved) if item["kind"] == "StatefulSet"]
    pod = stateful_set["spec"]["template"]
    (trainer,) = pod["spec"]["containers"]
    told = {variable["name"]: variable.get("value", "") for variable in trainer["env"]}["NCCL_SOCKET_IFNAME"].split(",")
    devices = [name for name in trainer["resources"]["limits"] if name.startswith("openshift.io/")]
    assert len(pod["metadata"]["annotations"][ANNOTATION_NETWORKS].split(",")) == len(devices) == len(told) == 4


RESTRICTED_V2: dict[str, Any] = {
    "allowHostDirVolumePlugin": False,
    "allowHostIPC": False,
    "allowHostNetwork": False,
    "allowHostPID": False,
    "allowHostPorts": False,
    "allowPrivilegeEscalation": False,
    "allowPrivilegedContainer": False,
    "allowedCapabilities": ["NET_BIND_SERVICE"],
    "defaultAddCapabilities": None,
    "fsGroup": {"type": "MustRunAs"},
    "groups": [],
    "priority": None,
    "readOnlyRootFilesystem": False,
    "requiredDropCapabilities": ["ALL"],
    "runAsUser": {"type": "MustRunAsRange"},
    "seLinuxContext": {"type": "MustRunAs"},
    "seccompProfiles": ["runtime/default"],
    "supplementalGroups": {"type": "RunAsAny"},
    "users": [],
    "volumes": ["configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected", "secret"],
}
"""https://github.com/openshift/cluster-kube-apiserver-operator, bindata/bootkube/scc-manifests/…scc-restricted-v2.yaml, without its
metadata.
"""


def test_the_scc_of_rdma_pods_is_restricted_v2_but_for_root_with_ipc_lock() -> None:
    scc = yaml.safe_load((ROOT / "manifests/operator/overlays/openshift/scc.yaml").read_text())
    stated = {key: value for key, value in scc.items() if key not in ("apiVersion", "kind", "metadata")}
    differs = {key: stated.get(key) for key in stated.keys() | RESTRICTED_V2.keys() if stated.get(key) != RESTRICTED_V2.get(key)}
    assert set(differs.pop("volumes")) < set(RESTRICTED_V2["volumes"])
    assert differs == {"allowedCapabilities": ["IPC_LOCK"], "runAsUser": {"type": "RunAsAny"}}


def test_every_container_of_an_rdma_pod_is_let_in_by_that_scc() -> None:
    """Each drops ALL itself, and adds and mounts nothing that the SCC does not allow."""
    scc = yaml.safe_load((ROOT / "manifests/operator/overlays/openshift/scc.yaml").read_text())
    pod = next(item for item in rdma_objects() if item["kind"] == "StatefulSet")["spec"]["template"]["spec"]
    added = []
    for container in (*pod["initContainers"], *pod["containers"]):
        capabilities = container["securityContext"]["capabilities"]
        assert capabilities["drop"] == scc["requiredDropCapabilities"]
        added += capabilities.get("add", [])
    assert added == scc["allowedCapabilities"]
    assert {"persistentVolumeClaim", *(next(key for key in volume if key != "name") for volume in pod["volumes"])} <= set(scc["volumes"])


def test_lockstep_s_own_containers_write_to_mounted_volumes_only_and_say_what_they_need() -> None:
    """What linters of manifests ask for by default. Not of the trainer's container: people's programs write where they like, and no CPU
    limit throttles any.
    """
    [operator] = [item for item in kustomized(ROOT / "manifests/operator/base") if item["kind"] == "Deployment"]
    [job_s] = [item for item in rdma_objects() if item["kind"] == "StatefulSet"]
    [probe, *_] = probe_pods(rdma_cluster(), "x", "image:1")
    own = [
        *operator["spec"]["template"]["spec"]["containers"],
        *job_s["spec"]["template"]["spec"]["initContainers"],
        *probe["spec"]["containers"],
    ]
    assert len(own) == 3
    for container in own:
        security, resources = container["securityContext"], container["resources"]
        assert (security["readOnlyRootFilesystem"], security["allowPrivilegeEscalation"]) == (True, False)
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert {"cpu", "memory"} <= resources["requests"].keys() and "memory" in resources["limits"]


def test_a_replica_that_is_not_ready_keeps_no_node_from_being_drained() -> None:
    [budget] = [item for item in kustomized(ROOT / "manifests/operator/base") if item["kind"] == "PodDisruptionBudget"]
    assert (budget["spec"]["maxUnavailable"], budget["spec"]["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")


def rdma_objects() -> list[dict[str, Any]]:
    found = parse_cluster_file((ROOT / "clusters/barcelona.yaml").read_text(), "barcelona.yaml")
    return render(resolve(job(fabric={"mode": "RDMA"}), found.profile, PlatformDefaults(namespace="nccl-test", image="trainer:1")))
