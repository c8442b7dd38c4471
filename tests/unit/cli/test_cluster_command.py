"""`lockstep cluster discover` and `lint` as people type them, against an API server of plain dicts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.cli.main import main
from lockstep.kube.cluster import ApiError, Cluster
from support.api_stub import ApiStub, kubeconfig, served
from support.cluster_facts import GROUPS, RAILS, node, policy, rail, storage_class
from support.fake_cluster import FakeCluster

FORBIDDEN = ApiError(403, "Forbidden", "jane may not do that")


class Api(FakeCluster):
    """The RDMA cluster of cluster_facts, which answers like an API server."""

    server = "https://api.example.com:6443"
    namespace = "nccl-test"

    def __init__(self) -> None:
        lists = {
            "Node": [node("a"), node("b")],
            "NetworkAttachmentDefinition": list(map(rail, RAILS)),
            "SriovNetworkNodePolicy": list(map(policy, RAILS)),
            "StorageClass": [storage_class("nfs", "nfs.csi.k8s.io"), storage_class("ceph-rbd", "x.rbd.csi.ceph.com", default=True)],
            "Namespace": [{"metadata": {"name": "nccl-test"}}],
        }
        super().__init__(*({**item, "kind": kind} for kind, items in lists.items() for item in items))

    async def __aenter__(self) -> Api:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def request(self, method: str, path: str, body: Any = None, **_: Any) -> Any:
        if self.refused.get("everything"):
            raise self.refused["everything"]
        return {"gitVersion": "v1.30.1", "groups": [{"name": group} for group in GROUPS], "status": {"allowed": True}}


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    found = Api()

    async def connect(context: str | None = None) -> Api:
        return found

    monkeypatch.setattr(Cluster, "connect", connect)
    return found


def lockstep(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["lockstep", "cluster", *arguments])
    try:
        return main()
    except SystemExit as ended:
        return int(ended.code or 0)


def test_what_is_discovered_is_written_and_passes_lint(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    assert lockstep(monkeypatch, "discover", "mine", "-o", str(path)) == 0
    assert parse_cluster_file(path.read_text(), str(path)).cluster.name == "mine"
    assert f"Wrote {path}" in capsys.readouterr().out
    assert lockstep(monkeypatch, "lint", str(path)) == 1  # SCCs: none there yet
    told = capsys.readouterr().out
    assert "no SCC allows IPC_LOCK to UID 0" in told and told.count("failed ") == 1


def test_what_the_cluster_has_and_the_file_leaves_unused_is_shown_at_discover_and_lint(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = node("c", gpus=0, rails=0)
    other["status"]["allocatable"]["amd.com/gpu"] = "8"
    api.objects["Node", "c"] = {**other, "kind": "Node"}
    path = tmp_path / "mine.yaml"
    assert lockstep(monkeypatch, "discover", "mine", "-o", str(path)) == 0
    assert "  gpus: there is amd.com/gpu, which Lockstep doesn't use: 8 on c\n" in capsys.readouterr().out
    lockstep(monkeypatch, "lint", str(path))
    assert "gpus: there is amd.com/gpu, which Lockstep doesn't use: 8 on c\n" in capsys.readouterr().out


def test_networks_that_every_pod_may_have_are_rails_too(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in RAILS:
        name = f"eno{number}np0-network"
        api.objects["NetworkAttachmentDefinition", name]["metadata"]["namespace"] = "default"

    async def list_of(kind: str, namespace: str | None = None, query: Any = None) -> Any:
        items = (await Api.list(api, kind, namespace, query))["items"]
        return {"items": [one for one in items if kind != "NetworkAttachmentDefinition" or one["metadata"]["namespace"] == namespace]}

    monkeypatch.setattr(api, "list", list_of)
    assert lockstep(monkeypatch, "discover", "mine", "-o", "-") == 0
    assert "- {network: default/eno5np0-network, resource: openshift.io/eno5np0rdma}" in capsys.readouterr().out


def test_a_file_that_is_there_is_left_alone(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("mine")
    assert lockstep(monkeypatch, "discover", "mine", "-o", str(path)) == 2
    assert path.read_text() == "mine" and "already exists" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["Not_A_Name", "a/b", "x'y"])
def test_a_name_that_can_not_be_is_refused_before_anything_is_asked(
    name: str, api: Api, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    api.refused["everything"] = FORBIDDEN
    assert lockstep(monkeypatch, "discover", name, "-o", "-") == 2
    assert "cluster.name" in capsys.readouterr().err


def test_what_may_not_be_seen_is_told_on_stderr(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api.refused |= dict.fromkeys(("Node", "StorageClass", "Namespace"), FORBIDDEN)
    assert lockstep(monkeypatch, "discover", "mine", "-o", str(tmp_path / "m.yaml")) == 0
    assert "gpus.per_node: you may not list Node objects (403)" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [("discover", "mine", "-o", "-"), ("lint", "template.yaml")])
def test_a_cluster_that_refuses_everything_is_one_sentence(
    verb: tuple[str, ...], api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api.refused["everything"] = FORBIDDEN
    monkeypatch.chdir(tmp_path)
    (tmp_path / "template.yaml").write_text("cluster: {name: t, namespace: n}\n")
    assert lockstep(monkeypatch, *verb) == 1
    assert "https://api.example.com:6443 doesn't answer as it should: jane may not do that (403 Forbidden)" in capsys.readouterr().err


def test_a_context_of_another_cluster_is_told_after_what_the_file_alone_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, "https://api.example.com:6443")))
    path = tmp_path / "c.yaml"
    path.write_text(
        yaml.safe_dump(
            {"cluster": {"name": "c", "namespace": "n", "api": "api.other.com"}, "network": {"tcp": {"interface_exclude": "^eth9"}}}
        )
    )
    assert lockstep(monkeypatch, "lint", str(path)) == 1
    told = capsys.readouterr()
    assert f"warning  {path}:7: network.tcp.interface_exclude" in told.out
    assert "only the file was checked: your kubeconfig talks to https://api.example.com:6443, but cluster c is at api.other.com" in told.err
    assert lockstep(monkeypatch, "lint", str(path), "--offline") == 0


def test_findings_as_json_have_line_key_and_fix(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("cluster:\n  name: c\n  namespace: n\nnodes:\n  gpu_nodes: [zz, b]\n")
    assert lockstep(monkeypatch, "lint", str(path), "-o", "json") == 1
    found = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert (found["nodes.gpu_nodes"]["line"], found["nodes.gpu_nodes"]["verdict"]) == (5, "failed")
    assert found["cluster.namespace"]["fix"] == "kubectl create namespace n"


@pytest.mark.parametrize(("there", "tried"), [(True, ["All"]), (False, [])])
def test_lint_writes_nothing_but_a_dry_run_of_one_pod(
    there: bool, tried: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that only where the namespace is there."""
    (tmp_path / "c.yaml").write_text("cluster: {name: c, namespace: team, platform: kubernetes}\n")
    stub = ApiStub({"/api/v1/namespaces/team": {"metadata": {"name": "team"}}} if there else {})
    with served(stub, tmp_path) as path:
        monkeypatch.setenv("KUBECONFIG", str(path))
        lockstep(monkeypatch, "lint", str(tmp_path / "c.yaml"))
    writes = [(path, query.get("dryRun", "")) for method, path, query in stub.asked if method != "GET"]
    assert writes == [("/api/v1/namespaces/team/pods", dry) for dry in tried]


def test_lint_warns_of_an_operator_s_image_that_can_not_be_pulled_until_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text("cluster: {name: c, namespace: team, platform: kubernetes}\n")
    operator = {
        "metadata": {"name": "lockstep-operator"},
        "spec": {"template": {"spec": {"containers": [{"image": "lockstep-operator:0.1.0"}]}}},
    }
    warnings = []
    for objects in ({}, {"/apis/apps/v1/namespaces/lockstep-system/deployments/lockstep-operator": operator}):
        with served(ApiStub({"/api/v1/namespaces/team": {"metadata": {"name": "team"}}, **objects}), tmp_path) as path:
            monkeypatch.setenv("KUBECONFIG", str(path))
            lockstep(monkeypatch, "lint", str(tmp_path / "c.yaml"))
        warnings.append("a first deployment needs --image" in capsys.readouterr().out)
    assert warnings == [True, False]


@pytest.mark.parametrize("name", ["barcelona", "nerc-production", "local"])
def test_the_files_of_this_checkout_have_nothing_to_mend(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lockstep(monkeypatch, "lint", name, "--offline") == 0
    *image, finding, fix, end = capsys.readouterr().out.splitlines()
    assert ["image: the cluster sets none: jobs without an image run lockstep-trainer:" in line for line in image] == [True] * (
        name != "local"
    )
    assert re.match(rf"unknown  clusters/{name}.yaml:\d+: calibration: never calibrated over (RDMA|TCP)", finding)
    assert (fix.strip(), end) == (f"→ lockstep cluster calibrate {name} --save", "nothing to fix")


def test_without_a_kubeconfig_the_file_is_still_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    (tmp_path / "c.yaml").write_text("cluster: {name: c, namespace: n}\nnetwork: {tcp: {interface_exclude: ^eth9}}\n")
    assert lockstep(monkeypatch, "lint", str(tmp_path / "c.yaml")) == 2
    told = capsys.readouterr()
    assert "network.tcp.interface_exclude" in told.out and told.err.startswith("lockstep: ")
