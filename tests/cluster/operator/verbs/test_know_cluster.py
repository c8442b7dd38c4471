"""`lockstep cluster` on the embedded cluster: as administrator, and with rights in one namespace only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client

from lockstep.api.files.clusterfile import parse_cluster_file
from support.clusters.cluster_jobs import Jobs, until
from support.clusters.own_cluster import client_kubeconfig
from support.in_process import lockstep


@pytest.fixture
def person(jobs: Jobs) -> Iterator[str]:
    """Whoever holds the role `admin` in the jobs' namespace and nothing else; KUBECONFIG is theirs."""
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "know-cluster"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "admin"}
    body = {"metadata": {"name": "know-cluster"}, "roleRef": role, "subjects": [subject]}
    rbac = client.RbacAuthorizationV1Api(jobs.api.client)
    rbac.create_namespaced_role_binding(jobs.namespace, body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(client_kubeconfig("know-cluster")))
        yield "know-cluster"
    rbac.delete_namespaced_role_binding("know-cluster", jobs.namespace)


def test_what_an_administrator_discovers_passes_lint(jobs: Jobs, tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    assert lockstep("cluster", "discover", "here", "-o", str(path), "-n", jobs.namespace).returncode == 0
    spec = parse_cluster_file(path.read_text(), str(path)).profile.spec
    assert (spec.platform.value, spec.gpus.per_node, spec.gpus.default_nodes) == ("Kubernetes", 0, 2)
    assert lockstep("cluster", "lint", str(path)).returncode == 0


def test_with_rights_in_one_namespace_the_rest_is_unknown(jobs: Jobs, person: str, tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    discovered = lockstep("cluster", "discover", "here", "-o", str(path), "-n", jobs.namespace)
    assert discovered.returncode == 0 and "gpus.per_node: you may not list Node objects (403)" in discovered.stderr
    linted = lockstep("cluster", "lint", str(path))
    assert linted.returncode == 0 and "unknown  " in linted.stdout


def test_probe_pods_see_the_nodes_from_inside_with_rights_in_one_namespace(jobs: Jobs, person: str, tmp_path: Path) -> None:
    image = "localhost/lockstep/base:1"
    done = lockstep("cluster", "discover", "here", "-o", str(tmp_path / "h.yaml"), "-n", jobs.namespace, "--probe", image)
    assert done.returncode == 0
    seen = re.findall(r"node (\S+): 0 GPUs; RDMA devices none; eth0 MTU 1500; lockable memory .*; CapEff 0+\n", done.stdout)
    assert len(set(seen)) == 2
    left = jobs.kind("Pod").get(namespace=jobs.namespace, label_selector="lockstep.dev/probe").to_dict()["items"]
    assert [pod for pod in left if not pod["metadata"].get("deletionTimestamp")] == []


def test_a_file_that_does_not_fit_the_cluster_fails_with_its_lines(jobs: Jobs, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(
        f"cluster:\n  name: wrong\n  namespace: {jobs.namespace}\n  platform: kubernetes\nnodes:\n  gpu_nodes: [nobody, noone]\nstorage:\n "
        " class_rwx: gone\n"
    )
    linted = lockstep("cluster", "lint", str(path))
    assert linted.returncode == 1
    assert f"failed   {path}:6: nodes.gpu_nodes: nodes nobody, noone are not in the cluster" in linted.stdout
    assert f"failed   {path}:8: storage.class_rwx: there is no storage class gone" in linted.stdout


def test_what_a_limit_range_makes_of_a_pod_is_told_in_the_api_servers_words(other: Jobs, tmp_path: Path) -> None:
    path = tmp_path / "limited.yaml"
    path.write_text(
        f"cluster: {{name: limited, namespace: {other.namespace}, platform: kubernetes}}\nresources:\n  requests: {{cpu: 2, memory: 1Gi}}\n"
    )
    rule = {"type": "Container", "default": {"cpu": "1", "memory": "2Gi"}}
    other.create({"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small"}, "spec": {"limits": [rule]}})

    def refused() -> bool:
        done = lockstep("cluster", "lint", str(path))
        refusals = ("the API server refuses a pod of this size: ", "must be less than or equal to cpu limit of 1")
        return done.returncode == 1 and all(words in done.stdout for words in refusals)

    until("the refusal of a request above the default limit", refused, 30)
    path.write_text(path.read_text().replace("cpu: 2", "cpu: 1"))
    text = lockstep("cluster", "lint", str(path)).stdout
    assert "resources.limits.memory: it states no limit, and a LimitRange of the namespace then limits every pod to 2Gi memory" in text
    assert "refuses a pod of this size" not in text


def test_a_sweep_is_measured_with_rights_in_one_namespace_and_leaves_nothing_behind(jobs: Jobs, person: str, tmp_path: Path) -> None:
    path = tmp_path / "local.yaml"
    path.write_text((Path(__file__).resolve().parents[4] / "clusters" / "local.yaml").read_text())
    done = lockstep("cluster", "calibrate", str(path), "-n", jobs.namespace, "--save")
    assert done.returncode == 0 and re.search(r"all-reduce over 2 ranks\n.*\n +1 MiB .*\n +2 MiB ", done.stdout)
    assert [point.bytes for point in parse_cluster_file(path.read_text(), "local.yaml").calibration[0].sweep] == [
        2**power for power in range(20, 25)
    ]
    until("its pods gone", lambda: not jobs.pods("lockstep-calibrate"), 60)
    claims = jobs.kind("PersistentVolumeClaim").get(namespace=jobs.namespace).to_dict()["items"]
    assert [claim["metadata"]["name"] for claim in claims if "calibrate" in claim["metadata"]["name"]] == []
