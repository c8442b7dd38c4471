"""`lockstep deploy` and its siblings, typed by who has only the role `admin` in a namespace."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer import Exit

from lockstep.api.errors import Failed
from lockstep.api.names import OPERATOR_NAME, OPERATOR_NAMESPACE
from lockstep.cli.clusters import clean
from lockstep.cli.clusters.deploy import deploy
from lockstep.cli.clusters.deploymentplan import DeploymentPlan, Mode, planned
from lockstep.cli.clusters.overview import status
from lockstep.cli.shared import folders
from lockstep.cli.shared.jobargs import TargetOptions
from lockstep.cli.shared.places import Verb
from lockstep.kube.kinds import path_of
from lockstep.plan.cluster.scope import definitions
from lockstep.plan.ship.deploy import called
from support.api_stub import ApiStub, Object, served

JOBS = "/apis/lockstep.dev/v1alpha1"
LEASE = path_of("Lease", OPERATOR_NAMESPACE, OPERATOR_NAME)


class NamespaceAdmins(ApiStub):
    """A cluster on which a person may do everything in namespace team, and nothing elsewhere."""

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Object | str]:
        if path == path_of("SelfSubjectAccessReview"):
            return 201, {"status": {"allowed": body["spec"]["resourceAttributes"]["namespace"] == "team"}}
        if path == JOBS:
            return (
                (200, {})
                if JOBS in self.objects
                else (404, {"kind": "Status", "reason": "NotFound", "message": "no such group", "code": 404})
            )
        hidden = "/namespaces/team/" not in path or (path.startswith(JOBS) and JOBS not in self.objects)
        if hidden and self.plural(path) and path not in self.objects:
            return 403, {"kind": "Status", "reason": "Forbidden", "message": f'"person" cannot {method} {self.plural(path)}', "code": 403}
        return super().answer(method, path, body)

    @property
    def written(self) -> list[str]:
        return [path for method, path, _ in self.asked if method != "GET" and path != path_of("SelfSubjectAccessReview")]


@pytest.fixture
def there() -> NamespaceAdmins:
    return NamespaceAdmins({JOBS: {}})


@pytest.fixture
def mine(there: NamespaceAdmins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A cluster file of namespace team, and its cluster."""
    path = tmp_path / "mine.yaml"
    path.write_text("cluster: {name: mine, namespace: team, platform: kubernetes}\nimage: trainer:1\n")
    monkeypatch.setenv("LOCKSTEP_STATE", str(tmp_path / "state"))
    with served(there, tmp_path) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        yield str(path)


@pytest.fixture
def carried_out(monkeypatch: pytest.MonkeyPatch) -> list[DeploymentPlan]:
    """Plans that were to be sent."""
    plans: list[DeploymentPlan] = []

    async def carry_out(plan: DeploymentPlan, *_: Any) -> bool:
        plans.append(plan)
        return True

    monkeypatch.setattr("lockstep.cli.clusters.deploy.carry_out", carry_out)
    monkeypatch.setattr("lockstep.cli.clusters.deploy._refuse_unpullable", lambda plan, context: None)  # another matter: test_deploy.py
    return plans


def type_at_a_terminal(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal(text))


@pytest.mark.parametrize(("typed", "agrees"), [("\n", True), ("y\n", True), ("n\n", False)], ids=["Enter", "yes", "no"])
def test_at_a_terminal_one_is_asked_before_anything_is_sent(
    typed: str,
    agrees: bool,
    mine: str,
    there: NamespaceAdmins,
    carried_out: list[DeploymentPlan],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    type_at_a_terminal(monkeypatch, typed)
    if agrees:
        deploy(TargetOptions(), mine, Mode.TCP)
    else:
        with pytest.raises(
            Failed, match=r"^nothing was sent; an administrator installs the operator of the whole cluster: lockstep deploy "
        ):
            deploy(TargetOptions(), mine, Mode.TCP)
    asked = capsys.readouterr()
    assert "your account may not install an operator of the whole cluster (it may not change TrainingClusters, " in asked.err
    assert "Install an operator for namespace team alone? [Y/n]: " in asked.out
    assert there.written == []
    assert [plan.choices for plan in carried_out] == (["--mode tcp --namespace-only"] if agrees else [])


def test_without_a_terminal_the_refusal_has_the_command(
    mine: str, there: NamespaceAdmins, carried_out: list[DeploymentPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(Failed) as refused:
        deploy(TargetOptions(), mine, Mode.TCP, dev=False, image="r/o:1", force=True)
    sentence, command = refused.value.args
    assert sentence.endswith(", and nothing was sent. For an operator of namespace team alone, type:")
    assert command == f"  lockstep deploy {mine} --mode tcp --image r/o:1 --no-dev --force --namespace-only"
    assert there.written == [] and carried_out == []


@pytest.mark.parametrize("terminal", [False, True])
def test_without_the_definitions_there_are_files_for_an_administrator_and_no_question(
    terminal: bool,
    mine: str,
    there: NamespaceAdmins,
    carried_out: list[DeploymentPlan],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    del there.objects[JOBS]
    if terminal:
        type_at_a_terminal(monkeypatch, "\n")
    with pytest.raises(Failed) as refused:
        deploy(TargetOptions(), mine, Mode.TCP)
    sentence, *commands = refused.value.args
    assert sentence.startswith(
        "this cluster doesn't know TrainingJobs, and nothing was sent: an administrator of the cluster types this once, with the files that"
    )
    folder = folders.state_folder() / "deploy/mine"
    apply = "  kubectl apply --server-side --force-conflicts --field-manager=lockstep-deploy -f"
    wait = f"  kubectl wait --for=condition=Established -f {folder}/definitions.yaml"
    assert commands == [f"{apply} {folder}/definitions.yaml", wait, f"{apply} {folder}/cluster.yaml"]
    assert {item["kind"] for item in yaml.safe_load_all((folder / "definitions.yaml").read_text())} == {"CustomResourceDefinition"}
    assert there.written == [] and carried_out == [] and capsys.readouterr().out == ""


@pytest.mark.parametrize("cluster", ["barcelona", "nerc-production", "local"])
def test_an_administrator_sends_the_roles_of_people_and_where_rdma_needs_them_the_scc_and_the_right_to_it(cluster: str) -> None:
    sent = [called(item) for item in definitions(planned(Verb(), cluster, Mode.AUTO).objects) if item["kind"] != "CustomResourceDefinition"]
    roles = {f"ClusterRole lockstep-{role}" for role in ("view", "edit", "admin")}
    namespace = planned(Verb(), cluster, Mode.AUTO).namespace
    rdma = {"ClusterRole lockstep-rdma", "SecurityContextConstraints lockstep-rdma", f"RoleBinding {namespace}/lockstep-rdma"}
    assert set(sent) == (roles | rdma if cluster == "barcelona" else roles)


@pytest.mark.parametrize(
    "stated",
    [{"namespaces": "all"}, {"namespaces": "team"}, {"namespace_only": True}, {"monitoring": True}],
    ids=lambda option: next(iter(option)),
)
def test_who_says_where_the_operator_is_to_work_is_not_asked(
    stated: dict[str, Any], mine: str, carried_out: list[DeploymentPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.confirm", lambda *_, **__: pytest.fail("asked"))
    deploy(TargetOptions(), mine, Mode.TCP, **stated)
    assert len(carried_out) == 1


def test_where_an_operator_works_already_one_is_not_asked(
    mine: str, there: NamespaceAdmins, carried_out: list[DeploymentPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.confirm", lambda *_, **__: pytest.fail("asked"))
    there.objects[LEASE] = {"metadata": {"name": OPERATOR_NAME}}
    deploy(TargetOptions(), mine, Mode.TCP)
    assert [plan.choices for plan in carried_out] == ["--mode tcp"]


def test_a_diff_shows_what_one_of_the_namespace_alone_would_change(
    mine: str, there: NamespaceAdmins, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compared: list[Object] = []
    monkeypatch.setattr("lockstep.cli.clusters.difference.diff_deployment", lambda objects, context: compared.extend(objects))
    deploy(TargetOptions(), mine, Mode.TCP, diff=True)
    assert {item["metadata"].get("namespace") for item in compared} == {"team"}
    assert "this is what an operator of namespace team alone (--namespace-only) would change:" in capsys.readouterr().err
    assert there.written == []


def test_a_status_says_what_can_t_be_seen_and_shows_the_rest(mine: str, there: NamespaceAdmins, capsys: pytest.CaptureFixture[str]) -> None:
    status(TargetOptions(), mine)
    shown = capsys.readouterr().out
    assert "operator   you may not look (namespace lockstep-system)" in shown and "jobs       none in namespace team" in shown
    del there.objects[JOBS]
    with pytest.raises(Exit):
        status(TargetOptions(), mine)
    assert "jobs       this cluster doesn't know TrainingJobs: lockstep deploy mine" in capsys.readouterr().out


def test_a_clean_up_where_there_are_no_definitions_does_what_is_left_to_do(
    mine: str, there: NamespaceAdmins, capsys: pytest.CaptureFixture[str]
) -> None:
    del there.objects[JOBS]
    clean.clean(TargetOptions(), mine)
    assert "The dev environment of namespace team is removed" in capsys.readouterr().out


def test_a_rollback_says_who_does_it(mine: str, there: NamespaceAdmins) -> None:
    with pytest.raises(
        Failed, match=r"you may not look into namespace lockstep-system, .* nothing was changed: an administrator of the cluster does this"
    ):
        clean.rollback(TargetOptions(), mine, yes=True)
    assert there.written == []
