"""What `lockstep deploy` would send, and where it refuses to send it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import ANNOTATION_DEFAULT_CLUSTER, DEV_ENVIRONMENT, OPERATOR_NAME, OPERATOR_NAMESPACE
from lockstep.cli.clusters.clean import _refuse_while_jobs
from lockstep.cli.clusters.deploy import _checked, deploy, tell_end, tell_left
from lockstep.cli.clusters.deploymentplan import OPERATOR_IMAGE, Mode, planned, unpullable
from lockstep.cli.main import app
from lockstep.cli.shared import folders, target
from lockstep.cli.shared.clusterfiles import load_cluster
from lockstep.cli.shared.jobargs import TargetOptions
from lockstep.cli.shared.places import Verb
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.kube.kinds import path_of
from lockstep.plan.cluster.scope import OWN, Scope
from lockstep.plan.ship.deploy import Left, State
from lockstep.platforms.clusters.install import monitoring_objects, with_one_default, without_unknown_kinds
from lockstep.platforms.clusters.send import Sent
from support.api_stub import ApiStub, kubeconfig, served
from support.checkout import ROOT
from support.fake_cluster import FakeCluster

BESIDE_OPERATOR = "image-registry.openshift-image-registry.svc:5000/lockstep-system"
CHECKOUT = ROOT


def test_a_dry_run_prints_every_object_and_needs_no_cluster(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    deploy(TargetOptions(), "barcelona", Mode.RDMA, dry_run=True, dev=True)
    printed = list(yaml.safe_load_all(capsys.readouterr().out))
    assert printed[:-1] == planned(Verb(), "barcelona", Mode.RDMA).objects
    assert (printed[-1]["kind"], printed[-1]["metadata"]) == ("TrainingJob", {"name": "ml-dev-env", "namespace": "nccl-test"})
    kinds = {item["kind"] for item in printed}
    assert kinds >= {
        "CustomResourceDefinition",
        "TrainingCluster",
        "ServiceAccount",
        "ClusterRole",
        "Deployment",
        "Service",
        "SecurityContextConstraints",
    }
    profile = next(item for item in printed if item["kind"] == "TrainingCluster")
    assert (profile["metadata"]["name"], profile["spec"]["network"]["mode"]) == ("barcelona", "RDMA")


def test_of_a_cluster_without_an_image_a_deployment_says_which_one_jobs_get(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bare.yaml"
    path.write_text("cluster: {name: bare, namespace: n, platform: kubernetes}\n")
    deploy(TargetOptions(), str(path), Mode.TCP, dry_run=True)
    gets = "image: the cluster sets none: jobs without an image run lockstep-trainer:0.1.0, from the operator's registry"
    assert capsys.readouterr().err.startswith(f"note: {path}:1: {gets}")
    deploy(TargetOptions(), str(path), Mode.TCP, dry_run=True, image="r.example.com/mine:1")
    assert capsys.readouterr().err.startswith(f"warning: {path}:1: image: the cluster sets none, and jobs without an image are refused: ")
    path.write_text("cluster: {name: bare, namespace: n, platform: kubernetes}\nimage: trainer:1\n")
    deploy(TargetOptions(), str(path), Mode.TCP, dry_run=True)
    assert ": image: " not in capsys.readouterr().err


NO_RAILS = """cluster: {name: bare, namespace: n, platform: kubernetes}
network:
  rdma: {enabled: true}
security: {ipc_lock: true}
image: trainer:1
"""


@pytest.mark.parametrize("option", [{"dry_run": True}, {"diff": True}, {}], ids=["dry run", "diff", "deploy"])
def test_rdma_without_rails_is_warned_of_with_its_line_before_anything_is_sent(
    option: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bare.yaml"
    path.write_text(NO_RAILS)
    monkeypatch.setattr("lockstep.cli.clusters.deploy._checked", lambda verb, cluster, mode, *_: planned(verb, cluster, mode))
    monkeypatch.setattr("lockstep.cli.clusters.deploy._is_for_one_namespace", lambda *_, only_looks: False)
    monkeypatch.setattr("lockstep.cli.clusters.difference.diff_deployment", lambda objects, context: None)
    monkeypatch.setattr("lockstep.cli.clusters.deploy.without_release", lambda plan, *_, is_stated: plan)

    async def carry_out(plan: Any, *_: Any) -> bool:
        return True

    monkeypatch.setattr("lockstep.cli.clusters.deploy.carry_out", carry_out)
    deploy(TargetOptions(), str(path), Mode.RDMA, image="r.example.com/lockstep-operator:1", **option)
    warned = capsys.readouterr().err
    assert warned.startswith(
        f"warning: {path}:3: network.rdma.rails: RDMA without rails: nothing puts an RDMA NIC into the pods\n  → one entry a NIC"
    )
    deploy(TargetOptions(), str(path), Mode.TCP, image="r.example.com/lockstep-operator:1", **option)
    assert capsys.readouterr().err == "", "jobs that use TCP need no rails"


PLAIN = "cluster: {name: bare, namespace: n, platform: kubernetes}\nimage: trainer:1\n"


def test_a_first_operator_whose_image_names_no_registry_is_refused_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bare.yaml"
    path.write_text(PLAIN)
    monkeypatch.setenv("LOCKSTEP_STATE", str(tmp_path / "state"))
    monkeypatch.setattr("lockstep.cli.clusters.deploy._is_for_one_namespace", lambda *_, only_looks: False)
    sent: list[str] = []

    async def carry_out(plan: Any, *_: Any) -> bool:
        sent.append(plan.image)
        return True

    monkeypatch.setattr("lockstep.cli.clusters.deploy.carry_out", carry_out)
    there = {"metadata": {"name": "lockstep-operator"}, "spec": {"template": {"spec": {"containers": [{"image": OPERATOR_IMAGE}]}}}}
    with served(ApiStub(), tmp_path) as config:
        monkeypatch.setenv("KUBECONFIG", str(config))
        with pytest.raises(Failed, match="names no registry that the cluster could pull it from, and nothing was sent") as refusal:
            deploy(TargetOptions(), str(path), Mode.TCP)
        assert refusal.value.args[1:3] == (
            "  lockstep build operator --tag REGISTRY/lockstep-operator:0.1.0 --push",
            f"  lockstep deploy {path} --mode tcp --image REGISTRY/lockstep-operator:0.1.0",
        )
        assert sent == []
        deploy(TargetOptions(), str(path), Mode.TCP, image=OPERATOR_IMAGE)
        assert sent == [OPERATOR_IMAGE], "who names it has put it on the nodes"
    with served(ApiStub({"/apis/apps/v1/namespaces/lockstep-system/deployments/lockstep-operator": there}), tmp_path) as config:
        monkeypatch.setenv("KUBECONFIG", str(config))
        deploy(TargetOptions(), str(path), Mode.TCP)
    assert len(sent) == 2, "an operator that is there goes on with its image"


def test_a_dry_run_warns_of_an_image_that_plain_kubernetes_can_not_pull(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bare.yaml"
    path.write_text(PLAIN)
    deploy(TargetOptions(), str(path), Mode.TCP, dry_run=True)
    warned = (
        f"warning: {path}:1: cluster.platform: a first deployment needs --image: the default, lockstep-operator:0.1.0, names no registry"
    )
    assert capsys.readouterr().err.startswith(warned)
    path.write_text(PLAIN.replace("kubernetes", "openshift"))
    deploy(TargetOptions(), str(path), Mode.TCP, dry_run=True)
    assert "--image" not in capsys.readouterr().err, "there it is an ImageStream"


IN_DEV_ENVIRONMENT = (
    "sync ml-dev-env workspace --cluster {}",
    "run --job ml-dev-env --cluster {} train_multi_node.py",
    "shell ml-dev-env --cluster {}",
)


@pytest.mark.parametrize("dev", [False, True], ids=["without dev environment", "with it"])
@pytest.mark.parametrize("name", ["barcelona", "local", "nerc-production"])
def test_the_commands_after_a_deployment_are_a_job_of_that_cluster(
    name: str, dev: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCKSTEP_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    tell_end(planned(Verb(), name, Mode.AUTO), dev=dev, complete=True)
    printed = capsys.readouterr().out
    typed = [line.partition("#")[0].split() for line in printed.splitlines() if line.startswith("  lockstep ")]
    assert [words[1:] for words in typed] == [
        ["init", "job", "first", "--cluster", name, "-o", "first.yaml"],
        ["plan", "-f", "first.yaml", "--cluster", name],
        ["run", "-f", "first.yaml", "--cluster", name],
        ["top", "first", "--cluster", name],
        ["cluster", "status", name],
        *([words.format(name).split() for words in IN_DEV_ENVIRONMENT] if dev else ()),
    ]
    typed = [words for words in typed if words[1] in ("init", "plan")]
    for words in typed:
        done = CliRunner().invoke(
            app,
            [str(CHECKOUT / word) if word.startswith("clusters/") else word for word in words[1:]]
            + (["--offline"] if words[1] == "plan" else []),
        )
        assert done.exit_code == (4 if words[1] == "plan" else 0), done.output  # its model is a placeholder, so memory isn't known
    assert yaml.safe_load((tmp_path / "first.yaml").read_text())["spec"]["cluster"] == name


@pytest.mark.parametrize(
    "typed", ["barcelona", "clusters/barcelona.yaml", "./clusters/barcelona.yaml", str(CHECKOUT / "clusters/barcelona.yaml")]
)
def test_the_commands_after_a_deployment_name_a_cluster_of_the_checkout_however_it_was_typed(
    typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CHECKOUT)
    commands = [command for command, _ in planned(Verb(), typed, Mode.AUTO).next_commands(dev=True)]
    assert [command for command in commands if "barcelona.yaml" in command] == []


def test_the_commands_after_a_deployment_have_the_path_of_a_file_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "my own.yaml"
    path.write_text(PLAIN)
    commands = [command for command, _ in planned(Verb(), str(path), Mode.AUTO).next_commands(dev=False)]
    assert commands[1] == f"lockstep plan -f first.yaml --cluster '{path}'"


def test_what_is_left_to_do_names_a_cluster_of_a_file_elsewhere_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my own.yaml"
    path.write_text(PLAIN)
    plan = planned(Verb(), str(path), Mode.TCP)
    monkeypatch.setenv("LOCKSTEP_STATE", str(tmp_path / "state"))
    tell_left(plan, Sent((), (Left(plan.objects[0], State.MISSING),)))
    assert f"\nThen repeat: lockstep deploy '{path}' --mode tcp\n" in capsys.readouterr().out
    clean = f"lockstep cluster clean '{path}'"
    with pytest.raises(ConfigError, match=re.escape(clean)):
        _refuse_while_jobs([{"metadata": {"name": DEV_ENVIRONMENT, "namespace": plan.namespace}}], plan)
    image = unpullable(plan.cluster, plan.typed)
    assert image is not None and f"lockstep deploy '{path}' --image " in image.fix


def test_a_cluster_that_was_deployed_by_the_path_of_its_file_is_the_default_until_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCKSTEP_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(PLAIN)
    plan = planned(Verb(), "mine.yaml", Mode.AUTO)
    tell_end(plan, dev=False, complete=False)
    assert "\nWhat is wrong: lockstep doctor mine.yaml\n" in capsys.readouterr().out
    assert folders.remembered() == []
    tell_end(plan, dev=False, complete=True)
    monkeypatch.chdir("/")
    assert [choice.cluster for choice in folders.remembered()] == [str(tmp_path / "mine.yaml")]
    monkeypatch.chdir(tmp_path)
    folders.forget(plan.cluster.cluster.name, plan.remembered)
    assert folders.remembered() == []


def test_rdma_is_refused_where_the_profile_has_none() -> None:
    with pytest.raises(ConfigError, match=r"^--mode rdma: cluster nerc-production has no RDMA .*: use --mode tcp$"):
        planned(Verb(), "nerc-production", Mode.RDMA)


def test_every_shipped_cluster_can_be_planned_over_tcp() -> None:
    names = sorted(path.stem for path in (CHECKOUT / "clusters").glob("*.yaml") if "platform: hosts" not in path.read_text())
    assert len(names) == 4
    for name in names:
        path = str(CHECKOUT / "clusters" / f"{name}.yaml")
        profile = next(item for item in planned(Verb(), path, Mode.TCP).objects if item["kind"] == "TrainingCluster")
        assert profile["spec"]["network"]["mode"] == "TCP"


@pytest.mark.parametrize(
    ("stated", "server", "same"),
    [
        ("barcelona.example.org", "https://api.barcelona.example.org:6443", True),
        ("api.barcelona.example.org", "https://api.barcelona.example.org:6443", True),
        ("api.barcelona.example.org:6443", "https://api.barcelona.example.org:6443", True),
        ("barcelona.example.org", "https://api.other.example.org:6443", False),
        ("example.org", "https://api.barcelona.example.org:6443", False),
        ("https://api.barcelona.example.org:6443/", "https://API.Barcelona.example.org.:6443", True),
        ("127.0.0.1:6443", "https://127.0.0.1:7443", False),
        ("api.example.org:443", "https://api.example.org", True),
        ("api.example.org:99999", "https://api.example.org:6443", False),
    ],
)
def test_the_api_host_of_the_cluster_file_is_compared_with_the_kubeconfig_s(stated: str, server: str, same: bool) -> None:
    assert target.is_same_host(stated, server) is same


def test_the_embedded_cluster_must_be_up_to_be_meant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="the embedded cluster is not up: lockstep devcluster up"):
        target.is_embedded(Verb(), "local")
    assert target.is_embedded(Verb(), "barcelona") is False


def test_another_cluster_than_the_file_s_is_refused_unless_it_is_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, "https://api.elsewhere.example.org:6443")))
    with pytest.raises(
        ConfigError, match=r"^your kubeconfig talks to https://api.elsewhere.example.org:6443, but cluster barcelona is at "
    ):
        target.refuse_other_cluster(Verb(), load_cluster("barcelona"), force=False)
    target.refuse_other_cluster(Verb(), load_cluster("barcelona"), force=True)


def deployed(image: str, mode: str) -> ApiStub:
    """A cluster on which barcelona was deployed."""
    operator = {"spec": {"template": {"spec": {"containers": [{"image": image}]}}}}
    return ApiStub({
        path_of("Deployment", OPERATOR_NAMESPACE, OPERATOR_NAME): operator,
        path_of("TrainingCluster", None, "barcelona"): {"spec": {"network": {"mode": mode}}},
    })  # fmt: skip


@pytest.mark.parametrize(
    ("there", "mode", "image", "expected"),
    [
        (deployed("registry/ours:1", "RDMA"), None, None, "--mode rdma --image registry/ours:1"),
        (deployed("registry/ours:1", "RDMA"), Mode.TCP, "registry/ours:2", "--mode tcp --image registry/ours:2"),
        (deployed("lockstep-operator:0.0.9", "Auto"), None, None, "--mode auto"),
        (deployed(f"{BESIDE_OPERATOR}/lockstep-operator:0.0.9", "Auto"), None, None, "--mode auto"),
        (deployed(f"{BESIDE_OPERATOR}/lockstep-operator@sha256:12ab", "Auto"), None, None, "--mode auto"),
        (ApiStub(), None, None, "--mode auto"),
        (ApiStub(forbidden={"*"}), None, None, "--mode auto"),
    ],
)
def test_a_second_deploy_keeps_the_image_and_the_mode_where_no_other_is_said(
    there: ApiStub, mode: Mode | None, image: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(there, tmp_path) as path:
        monkeypatch.setenv("KUBECONFIG", str(path))
        plan = _checked(Verb(), "barcelona", mode, image, force=True, monitoring=False)
    assert plan.choices == expected
    (container,) = next(item for item in plan.objects if item["kind"] == "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == (expected.partition("--image ")[2] or f"{BESIDE_OPERATOR}/{OPERATOR_IMAGE}")


@pytest.mark.parametrize(("there", "times"), [(deployed("lockstep-operator:0.0.9", "Auto"), 1), (deployed("registry/ours:1", "RDMA"), 2)])
def test_what_would_be_sent_is_made_again_only_where_what_is_deployed_changes_it(
    there: ApiStub, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr("lockstep.cli.clusters.deploy.planned", lambda *how: made.append(how) or planned(*how))
    with served(there, tmp_path) as path:
        monkeypatch.setenv("KUBECONFIG", str(path))
        _checked(Verb(), "barcelona", None, None, force=True, monitoring=False)
    assert len(made) == times


def test_monitoring_is_sent_only_when_asked_for() -> None:
    plain, watched = (planned(Verb(), "local", Mode.TCP, monitoring=monitoring).objects for monitoring in (False, True))
    assert watched[: len(plain)] == plain
    kinds = {item["kind"] for item in watched[len(plain) :]}
    assert kinds >= {"ServiceMonitor", "PrometheusRule", "ConfigMap"}


@pytest.mark.parametrize("there", [True, False])
def test_kinds_that_the_cluster_does_not_know_are_left_out_and_said(there: bool) -> None:
    class Crds(Cluster):
        def __init__(self) -> None:
            pass

        async def get(self, kind: str, namespace: str | None, name: str) -> dict[str, Any] | None:
            assert (kind, namespace) == ("CustomResourceDefinition", None)
            return {} if there else None

    said: list[str] = []
    objects = monitoring_objects(CHECKOUT / "manifests")
    found = asyncio.run(without_unknown_kinds(Crds(), objects, said.append))
    left_out = [item["kind"] for item in objects if item not in found]
    assert left_out == ([] if there else ["ServiceMonitor", "PrometheusRule"])
    assert said == ([] if there else [
        "left out ServiceMonitor lockstep-operator: this cluster has no CRD servicemonitors.monitoring.coreos.com",
        "left out PrometheusRule lockstep: this cluster has no CRD prometheusrules.monitoring.coreos.com",
    ])  # fmt: skip


@pytest.mark.parametrize("scope", [None, Scope(("lockstep", "b")), OWN])
def test_an_operator_of_one_namespace_comes_without_bounds_of_another_s_account(scope: Scope | None) -> None:
    kinds = {item["kind"] for item in planned(Verb(), "local", Mode.TCP, scope=scope).objects}
    assert ("ValidatingAdmissionPolicy" in kinds) == (scope != OWN)


@pytest.mark.parametrize(("other", "marked"), [("theirs", False), ("local", True), (None, True)])
def test_a_profile_becomes_the_default_only_where_no_other_one_is(other: str | None, marked: bool) -> None:
    mark = {ANNOTATION_DEFAULT_CLUSTER: "true"}
    there = FakeCluster(*([{"kind": "TrainingCluster", "metadata": {"name": other, "annotations": mark}}] if other else []))
    said: list[str] = []
    found = asyncio.run(with_one_default(there.as_cluster, planned(Verb(), "local", Mode.TCP).objects, said.append))
    profile = next(item for item in found if item["kind"] == "TrainingCluster")
    assert ((profile["metadata"].get("annotations") or {}) == mark) is marked
    assert bool(said) is not marked


def test_who_may_not_see_profiles_sends_what_they_may() -> None:
    blind = FakeCluster()
    blind.refused["TrainingCluster"] = ApiError(403, "Forbidden", "not yours")
    objects = planned(Verb(), "local", Mode.TCP).objects
    assert asyncio.run(with_one_default(blind.as_cluster, objects, pytest.fail)) == objects
