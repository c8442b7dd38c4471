"""What a deployment does with the rights it finds, what it leaves to an administrator, and what it goes back to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from typer import Exit

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import API_VERSION, DEV_ENVIRONMENT
from lockstep.api.objects import Object
from lockstep.cli.clusters import clean, deploy
from lockstep.cli.clusters.deploy import _rails_are_there, _refuse_platform, _start_dev_environment
from lockstep.cli.clusters.deploymentplan import Mode, planned
from lockstep.cli.clusters.difference import diff_deployment, print_next_starts, refuse_losses
from lockstep.cli.clusters.helm import without_release
from lockstep.cli.shared import folders as remembered
from lockstep.cli.shared.clusterfiles import load_cluster
from lockstep.cli.shared.jobargs import TargetOptions
from lockstep.cli.shared.places import Verb
from lockstep.cli.shared.terminal import Progress
from lockstep.kube.aim import Connections
from lockstep.kube.cluster import ApiError, Client, Cluster
from lockstep.kube.kinds import KINDS, path_of
from lockstep.plan.cluster.scope import ADMISSION, OWN, Scope
from lockstep.plan.diff import Change
from lockstep.plan.ship.deploy import Left, State, called, counted, difference, jobs_using, objects_of_cluster, removable_claims
from lockstep.plan.ship.openshift import puller
from lockstep.platforms.clusters import install, remove
from lockstep.platforms.clusters.devenv import dev_environment, ensure_dev_environment, how_far, lacking, until_up
from lockstep.platforms.clusters.facts import operator_trouble
from lockstep.platforms.clusters.install import InstallError
from lockstep.platforms.clusters.record import Deployment, Record, deployment_of, read_record, write_record
from lockstep.platforms.clusters.send import Sent, losses, next_starts, send_permitted, would_change


class Api(Cluster):
    """An API server of dicts, and a person who may do what `may` says of (kind, namespace)."""

    def __init__(self, cluster_wide: bool = True, refuses: str = "") -> None:
        super().__init__(None)
        self.objects: dict[str, Object] = {}
        self.cluster_wide = cluster_wide
        self.refuses = refuses
        self.tried: list[str] = []

    def _may(self, resource: str, namespace: str) -> bool:
        return self.cluster_wide or (namespace == "lockstep" and resource != "namespaces")

    async def request(
        self, method: str, path: str, body: object | None = None, query: Mapping[str, str] | None = None, content_type: str = ""
    ) -> Object:
        if path == path_of("SelfSubjectAccessReview"):
            asked = body["spec"]["resourceAttributes"]  # type: ignore[index]
            return {"status": {"allowed": self._may(asked["resource"], asked["namespace"])}}
        assert (method, path) == ("GET", "/apis/lockstep.dev/v1alpha1")
        if not any(name.startswith("CustomResourceDefinition") for name in self.objects):
            raise ApiError(404, "NotFound", "no such group")
        return {}

    def _checked(self, item: Object) -> str:
        namespace = item["metadata"].get("namespace", "")
        self.tried.append(called(item))
        if not self._may(KINDS[item["kind"]].plural, namespace) or item["kind"] == self.refuses:
            raise ApiError(403, "Forbidden", f"{item['kind']} is forbidden")
        return called(item)

    async def apply(self, item: Object, **_: Any) -> Object:
        name = self._checked(item)
        more = {"status": {"conditions": [{"type": "Established", "status": "True"}]}} if "Definition" in item["kind"] else {}
        self.objects[name] = {**item, **more}
        return item

    async def create(self, item: Object) -> Object:
        self.objects[self._checked(item)] = item
        return item

    async def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        if not self.cluster_wide and namespace != "lockstep" and kind != "Namespace":
            raise ApiError(403, "Forbidden", "no")
        return self.objects.get(called({"kind": kind, "metadata": {"namespace": namespace, "name": name}}))

    async def exists(self, kind: str, namespace: str | None, name: str) -> bool:
        return await self.get(kind, namespace, name) is not None

    async def list(self, kind: str, namespace: str | None = None, query: Mapping[str, str] | None = None) -> Object:
        found = [item for item in self.objects.values() if item["kind"] == kind]
        return {"items": [item for item in found if namespace in (None, item["metadata"].get("namespace"))]}

    async def delete(self, kind: str, namespace: str | None, name: str, uid: str | None = None, grace_seconds: int | None = None) -> None:
        self.objects.pop(called({"kind": kind, "metadata": {"namespace": namespace, "name": name}}), None)


def sent(api: Api) -> Sent:
    return asyncio.run(send_permitted(api, planned(Verb(), "local", Mode.TCP).objects, lambda text: None))


def test_an_administrator_sends_everything() -> None:
    api = Api()
    done = sent(api)
    assert done.left == () and done.is_complete
    assert len(api.tried) == len(planned(Verb(), "local", Mode.TCP).objects)


def test_what_the_rights_do_not_allow_is_never_tried_and_the_rest_is_sent() -> None:
    api = Api(cluster_wide=False)
    api.objects["Namespace lockstep"] = {"kind": "Namespace", "metadata": {"name": "lockstep"}}
    done = sent(api)
    assert [called(item) for item in done.objects] == [
        "PersistentVolumeClaim lockstep/lockstep-python",
        "ServiceAccount lockstep/ml-dev-sa",
    ]
    assert api.tried == [called(item) for item in done.objects]
    states = {called(part.item): part.state for part in done.left}
    assert states["Namespace lockstep"] is State.SAME
    assert states["Namespace lockstep-system"] is State.MISSING
    assert states["CustomResourceDefinition trainingjobs.lockstep.dev"] is State.MISSING, "the API server doesn't serve them"
    assert states["Deployment lockstep-system/lockstep-operator"] is State.UNSEEN
    assert not done.is_complete


def test_what_is_there_and_may_not_be_seen_does_not_make_it_incomplete() -> None:
    api = Api()
    sent(api)
    api.cluster_wide = False
    done = sent(api)
    assert done.is_complete
    assert {part.state for part in done.left} == {State.SAME, State.UNSEEN}


BOUNDS = ("ValidatingAdmissionPolicy lockstep-operator", "ValidatingAdmissionPolicyBinding lockstep-operator")


@pytest.mark.parametrize(("refuses", "why"), [("", "you may not send it"), (ADMISSION[0], f"{ADMISSION[0]} is forbidden")])
def test_the_bounds_of_the_operator_s_account_are_left_out_and_said_where_they_can_not_be_sent(refuses: str, why: str) -> None:
    class Bounded(Api):
        def _may(self, resource: str, namespace: str) -> bool:
            return bool(refuses) or not resource.startswith("validatingadmission")

    done = sent(Bounded(refuses=refuses))
    assert done.is_complete and done.left == ()
    end = "; the operator works without it, with all that RBAC allows"
    assert list(done.notes) == [f"left out {name}: {why}{end}" for name in BOUNDS[: 1 if refuses else 2]]


def test_uninstall_leaves_bounds_that_you_may_not_delete(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    for item in planned(Verb(), "local", Mode.TCP).objects:
        api.objects[called(item)] = item
    monkeypatch.setattr(Api, "_may", lambda self, resource, namespace: not resource.startswith("validatingadmission"))
    clean.uninstall(TargetOptions(), "local", yes=True)
    assert [name for name in BOUNDS if name in api.objects] == [*BOUNDS]
    assert "ClusterRole lockstep-operator" not in api.objects


@pytest.fixture
def released(api: Api) -> Api:
    """A cluster on which release `prod` of helm's has the operator and the CRDs, and nothing else."""
    for item in planned(Verb(), "local", Mode.TCP).objects:
        if item["metadata"].get("namespace") == "lockstep-system" or item["kind"] == "CustomResourceDefinition":
            item["metadata"] |= {"annotations": {"meta.helm.sh/release-name": "prod"}}
            api.objects[called(item)] = item
    return api


def test_a_deployment_leaves_to_helm_what_a_release_has_and_sends_the_rest(released: Api, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(Verb(), "local", Mode.TCP)
    rest = without_release(plan, Connections(), is_stated=True).objects
    assert {called(item) for item in plan.objects} - {called(item) for item in rest} == released.objects.keys()
    assert "TrainingCluster local" in map(called, rest)
    note = f"note: {len(released.objects)} objects, the operator among them, stay as helm's release prod has them\n"
    assert capsys.readouterr().err == note


@pytest.mark.parametrize("stated", [{"image": "reg/lockstep-operator:2"}, {"scope": Scope(("lockstep", "team"))}])
def test_a_deployment_that_is_to_change_helm_s_operator_is_refused_with_what_to_type(stated: dict[str, Any], released: Api) -> None:
    with pytest.raises(
        Failed, match=r"is helm's \(release prod\), and nothing was sent: .* \(helm upgrade prod CHART -n lockstep-system\)$"
    ):
        without_release(planned(Verb(), "local", Mode.TCP, **stated), Connections(), is_stated=True)


def test_what_no_option_says_of_helm_s_operator_is_not_taken_for_a_wish_to_change_it(released: Api) -> None:
    without_release(planned(Verb(), "local", Mode.TCP, "reg/lockstep-operator:2"), Connections(), is_stated=False)


def test_a_deployment_without_helm_s_operator_sends_all(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(Verb(), "local", Mode.TCP)
    assert without_release(plan, Connections(), is_stated=True) is plan and capsys.readouterr().err == ""


def test_uninstall_removes_nothing_of_helm_s(released: Api) -> None:
    before = dict(released.objects)
    with pytest.raises(Failed, match="is helm's, and nothing was removed: helm uninstall prod -n lockstep-system removes it"):
        clean.uninstall(TargetOptions(), "local", jobs=True, yes=True)
    assert released.objects == before


def test_a_refusal_in_spite_of_the_rights_is_left_with_its_reason() -> None:
    done = sent(Api(refuses="ClusterRole"))
    assert {part.item["kind"] for part in done.left} == {"ClusterRole"}
    assert {part.reason for part in done.left} == {"ClusterRole is forbidden"}
    assert not done.is_complete


def test_an_administrator_gets_files_and_the_commands_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCKSTEP_STATE", str(tmp_path / ".lockstep"))
    monkeypatch.chdir(tmp_path)
    plan = planned(Verb(), "barcelona", Mode.RDMA, "registry.example.com/lockstep-operator:1")
    crd, role = ({"kind": kind, "metadata": {"name": "x"}} for kind in ("CustomResourceDefinition", "ClusterRole"))
    there = {"kind": "Namespace", "metadata": {"name": "n"}}
    parts = (Left(crd, State.MISSING), Left(role, State.DIFFERS), Left(there, State.SAME))
    deploy.tell_left(plan, Sent((), parts))
    told = [line.strip() for line in capsys.readouterr().out.splitlines()]
    folder = ".lockstep/deploy/barcelona"
    assert "CustomResourceDefinition x: missing" in told and "ClusterRole x: differs" in told
    assert [line for line in told if line.startswith("kubectl")] == [
        f"kubectl apply --server-side --force-conflicts --field-manager=lockstep-deploy -f {folder}/definitions.yaml",
        f"kubectl wait --for=condition=Established -f {folder}/definitions.yaml",
        f"kubectl apply --server-side --force-conflicts --field-manager=lockstep-deploy -f {folder}/cluster.yaml",
    ]
    assert list(yaml.safe_load_all((tmp_path / folder / "cluster.yaml").read_text())) == [role]
    assert "lockstep deploy barcelona --mode rdma --image registry.example.com/lockstep-operator:1 --no-dev" in told


def test_a_dry_run_s_answer_shows_what_is_set_and_what_is_taken_away() -> None:
    before = {"metadata": {"name": "x", "resourceVersion": "1"}, "spec": {"a": 1, "b": 2}, "status": {"s": 1}}
    after = {"metadata": {"name": "x", "resourceVersion": "2"}, "spec": {"a": 3}}
    assert [(c.path, c.observed) for c in difference(after, before)] == [("spec.a", 1), ("spec.b", 2)]
    assert difference(before, before) == []


class Renewing(Api):
    """Whoever holds the Lease renews it `between` a look and the dry run, so many times."""

    def __init__(self, between: int) -> None:
        super().__init__()
        self.between = between
        self.version = 1

    def _lease(self, item: Object, version: int) -> Object:
        return {**item, "metadata": {**item["metadata"], "resourceVersion": str(version)}, "spec": {"renewTime": version}}

    async def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        return self._lease({"kind": kind, "metadata": {"namespace": namespace, "name": name}}, self.version)

    async def apply(self, item: Object, **how: Any) -> Object:
        assert how["dry_run"]
        if self.between:
            self.between -= 1
            self.version += 1
        return self._lease(item, self.version)


def test_what_others_write_between_a_look_and_the_dry_run_is_no_change() -> None:
    lease = {"kind": "Lease", "metadata": {"namespace": "n", "name": "x"}}
    for between in (0, 1, 4):
        assert asyncio.run(would_change(Renewing(between), lease)) == []
    assert [change.path for change in asyncio.run(would_change(Renewing(5), lease)) or ()] == ["spec.renewTime"], "it looks no more"


@pytest.mark.parametrize(
    ("answers", "code", "end"),
    [
        ([[], []], 0, "nothing would change: all 2 objects are as"),
        ([None, []], 1, "+ ConfigMap team/a"),
        ([ApiError(403, "Forbidden", "no"), []], 0, "nothing would change: 1 of 2 objects are as"),
    ],
)
def test_a_deployment_that_would_change_nothing_says_so(
    answers: list[Any], code: int, end: str, api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def would_change(cluster: Any, item: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, ApiError):
            raise answer
        return answer

    monkeypatch.setattr("lockstep.cli.clusters.difference.would_change", would_change)
    objects = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": "team"}} for name in "ab"]
    try:
        diff_deployment(objects, Connections())
    except Exit as ended:
        assert ended.exit_code == code == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith(end)


def test_objects_are_counted_by_kind() -> None:
    kinds = ["ClusterRole", "ClusterRole", "NetworkPolicy", "NetworkPolicy", "Lease"]
    assert counted([{"kind": kind} for kind in kinds]) == "2 ClusterRoles, 2 NetworkPolicies, 1 Lease"


def deployment(name: str, worked: bool = True) -> Deployment:
    return Deployment(name, ({"kind": "Deployment", "metadata": {"name": name}},), worked)


def test_a_rollback_goes_to_the_last_deployment_that_worked() -> None:
    good, broken, third = deployment("good"), deployment("broken", worked=False), deployment("third", worked=False)
    record = Record().followed_by(deployment("good", worked=False)).confirmed()
    assert record == Record(good, None)
    assert record.followed_by(deployment("good", worked=False)) == Record(good, None), "the same again replaces nothing"
    assert record.followed_by(broken) == Record(broken, good)
    assert record.followed_by(broken).followed_by(third) == Record(third, good)
    assert record.followed_by(third).confirmed().turned_back() == Record(good, deployment("third"))


def test_the_record_is_kept_on_the_cluster_without_crds_namespaces_and_claims() -> None:
    api = Api()
    objects = planned(Verb(), "local", Mode.TCP).objects
    record = Record(deployment_of(objects, "now"), deployment("before"))
    asyncio.run(write_record(api, record))
    assert asyncio.run(read_record(api)) == record
    assert {"CustomResourceDefinition", "Namespace", "PersistentVolumeClaim"}.isdisjoint(item["kind"] for item in record.current.objects)
    (kept,) = api.objects.values()
    assert sum(len(value) for value in kept["binaryData"].values()) < 100_000


def claim(name: str, **labels: str) -> Object:
    return {"kind": "PersistentVolumeClaim", "metadata": {"name": name, "namespace": "lockstep", "labels": labels}}


def test_only_claims_of_the_profile_and_of_the_dev_environment_may_be_removed() -> None:
    made = {"app.kubernetes.io/managed-by": "lockstep"}
    claims = [
        claim("ml-dev-workspace", **made),
        claim("ml-datasets"),  # somebody made it by hand
        claim("shared-models", **made),
        claim("workspace-ml-dev-env-0", **made, **{"lockstep.dev/job": "ml-dev-env"}),
        claim("workspace-other-0", **made, **{"lockstep.dev/job": "other"}),
    ]
    found = [item["metadata"]["name"] for item in removable_claims(load_cluster("local"), DEV_ENVIRONMENT, claims)]
    assert found == ["ml-dev-workspace", "workspace-ml-dev-env-0"]


def a_job(name: str, **spec: Any) -> Object:
    return {"kind": "TrainingJob", "metadata": {"name": name, "namespace": "lockstep"}, "spec": spec}


def put(api: Api, *items: Object) -> Api:
    for item in items:
        api.objects[called(item)] = item
    return api


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    """What every connection of a verb is to."""
    found = Api()

    async def connect(_: object) -> AbstractAsyncContextManager[Api]:
        return nullcontext(found)

    monkeypatch.setattr(Cluster, "connect", connect)
    monkeypatch.setattr(Client, "__init__", lambda *_: None)
    monkeypatch.setattr(Client, "connected", lambda _: nullcontext(found))
    monkeypatch.setattr(Api, "server", "https://here:6443")
    monkeypatch.setattr(clean, "_plan", lambda verb, cluster: planned(verb, cluster, Mode.TCP))
    return found


def test_clean_removes_the_dev_environment_and_leaves_other_jobs_with_their_account(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    account = {"kind": "ServiceAccount", "metadata": {"name": "ml-dev-sa", "namespace": "lockstep"}}
    put(api, a_job(DEV_ENVIRONMENT), a_job("other"), account)
    clean.clean(TargetOptions(), "local")
    assert set(api.objects) == {"TrainingJob lockstep/other", "ServiceAccount lockstep/ml-dev-sa"}
    assert "Job other stays, with its service account: lockstep delete NAME -n lockstep" in capsys.readouterr().out
    del api.objects["TrainingJob lockstep/other"]
    clean.clean(TargetOptions(), "local")
    assert api.objects == {}


def test_clean_asks_before_it_deletes_claims_and_does_nothing_where_nobody_can_answer(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = claim("ml-dev-workspace", **{"app.kubernetes.io/managed-by": "lockstep"})
    put(api, a_job(DEV_ENVIRONMENT), ours, claim("theirs"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    with pytest.raises(ConfigError, match=r"Delete the claims ml-dev-workspace .* with --yes"):
        clean.clean(TargetOptions(), "local", pvcs=True)
    assert len(api.objects) == 3
    clean.clean(TargetOptions(), "local", pvcs=True, yes=True)
    assert set(api.objects) == {"PersistentVolumeClaim lockstep/theirs"}


def test_clean_keeps_claims_that_other_jobs_may_use(api: Api) -> None:
    put(api, a_job("other"), claim("ml-dev-workspace", **{"app.kubernetes.io/managed-by": "lockstep"}))
    with pytest.raises(ConfigError, match="other of namespace lockstep may use the claims"):
        clean.clean(TargetOptions(), "local", pvcs=True, yes=True)
    assert len(api.objects) == 2


def test_uninstall_refuses_while_there_are_jobs_unless_they_are_to_go(api: Api) -> None:
    sent(api)
    put(api, a_job("other"))
    before = set(api.objects)
    with pytest.raises(ConfigError, match=r"there are TrainingJobs \(lockstep/other\)"):
        clean.uninstall(TargetOptions(), "local", yes=True)
    assert set(api.objects) == before
    clean.uninstall(TargetOptions(), "local", jobs=True, yes=True)
    assert {called(item).split()[0] for item in api.objects.values()} == {"PersistentVolumeClaim", "Namespace"}


def test_uninstall_names_the_way_to_remove_the_dev_environment_that_a_deployment_made(api: Api) -> None:
    sent(api)
    put(api, a_job(DEV_ENVIRONMENT))
    with pytest.raises(ConfigError, match=r"\(lockstep/ml-dev-env\).*: remove the dev environment first: lockstep cluster clean local$"):
        clean.uninstall(TargetOptions(), "local", yes=True)
    put(api, a_job("other"))
    with pytest.raises(
        ConfigError,
        match=r"lockstep cluster clean local; of the others, delete them first \(lockstep delete NAME -n NAMESPACE\), or use --jobs",
    ):
        clean.uninstall(TargetOptions(), "local", yes=True)
    clean.clean(TargetOptions(), "local")
    del api.objects["TrainingJob lockstep/other"]
    clean.uninstall(TargetOptions(), "local", yes=True)
    assert {called(item).split()[0] for item in api.objects.values()} == {"PersistentVolumeClaim", "Namespace"}


def test_a_namespace_s_own_operator_goes_without_jobs_that_are_stopped(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clean, "_plan", lambda verb, cluster: planned(verb, cluster, Mode.TCP, scope=OWN))
    for item in planned(Verb(), "local", Mode.TCP, scope=OWN).objects:
        asyncio.run(api.apply(item))
    put(api, {**a_job("other"), "status": {"nodes": 2}})
    with pytest.raises(ConfigError, match=r"pods that report to this operator \(lockstep/other\): stop them first"):
        clean.uninstall(TargetOptions(), "local", yes=True)
    put(api, {**a_job("other"), "status": {"nodes": 0}})
    clean.uninstall(TargetOptions(), "local", yes=True)
    assert {called(item).split()[0] for item in api.objects.values()} == {"PersistentVolumeClaim", "TrainingJob"}


@pytest.mark.parametrize("verb", [clean.uninstall, clean.rollback])
def test_uninstall_and_rollback_do_nothing_without_the_rights(api: Api, verb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent(api)
    record = Record(deployment_of(planned(Verb(), "local", Mode.TCP).objects, "now"), deployment("before"))
    asyncio.run(write_record(api, record))
    before = dict(api.objects)
    api.cluster_wide = False
    monkeypatch.setattr("lockstep.cli.clusters.clean.read_record", _returns(record))
    with pytest.raises(Failed, match=r"you may not .* an administrator of the cluster does this"):
        verb(TargetOptions(), "local", yes=True)
    assert api.objects == before


def _returns(record: Record) -> Any:
    async def read(cluster: Cluster, namespace: str) -> Record:
        return record

    return read


def test_a_rollback_names_what_stays_with_its_command_and_nothing_that_never_was_there(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scc = {"apiVersion": "security.openshift.io/v1", "kind": "SecurityContextConstraints", "metadata": {"name": "lockstep-rdma"}}
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "lockstep-rdma"}}
    sent(api)
    put(api, role)
    objects = planned(Verb(), "local", Mode.TCP).objects
    record = Record(deployment_of([*objects, scc, role], "now"), deployment_of(objects, "before"))
    monkeypatch.setattr("lockstep.cli.clusters.clean.read_record", _returns(record))
    monkeypatch.setattr("lockstep.cli.clusters.clean.until_ready", _nothing)
    clean.rollback(TargetOptions(), "local", yes=True)
    printed = capsys.readouterr().out
    assert (
        "ClusterRole lockstep-rdma was not part of that deployment and stays. To remove it: kubectl delete clusterrole lockstep-rdma"
        in printed
    )
    assert "SecurityContextConstraints" not in printed


async def _nothing(*_: Any, **__: Any) -> None:
    """In place of a wait."""


def test_rollback_without_an_earlier_deployment_says_so(api: Api) -> None:
    with pytest.raises(ConfigError, match="there is nothing to go back to"):
        clean.rollback(TargetOptions(), "local", yes=True)


def test_a_dev_environment_that_is_there_stays_as_its_people_have_it() -> None:
    api = Api()
    wanted = dev_environment(load_cluster("local").profile, "lockstep")
    assert asyncio.run(ensure_dev_environment(api, wanted)) == ("made", True)
    api.objects[called(wanted)] = {**wanted, "spec": {**wanted["spec"], "nodes": 1}}
    assert asyncio.run(ensure_dev_environment(api, wanted)) == ("is there already", True)
    assert api.objects[called(wanted)]["spec"]["nodes"] == 1
    api.objects[called(wanted)]["spec"]["suspend"] = True
    said, has_pods = asyncio.run(ensure_dev_environment(api, wanted))
    assert said.endswith("lockstep resume ml-dev-env -n lockstep") and not has_pods
    api.objects[called(wanted)] = a_job(DEV_ENVIRONMENT, script={"path": "x"})
    with pytest.raises(InstallError, match="not a dev environment but another job"):
        asyncio.run(ensure_dev_environment(api, wanted))


@pytest.mark.parametrize(
    ("spec", "conditions", "said"),
    [
        ({}, [("Accepted", "False", "no such cluster")], "is not accepted: no such cluster"),
        (
            {},
            [("Failed", "True", "the image has no Python")],
            "has failed: the image has no Python: .* lockstep retry ml-dev-env -n lockstep",
        ),
        (
            {},
            [("Accepted", "False", "an earlier job of this name is still being removed", "PreviousJobRemains")],
            "is not up after .*: 0 of 2 pods run: an earlier job of this name is still being removed",
        ),
        ({}, [("PodsScheduled", "False", "0 of 2 nodes have 4 GPUs free")], "0 of 2 pods run: 0 of 2 nodes have 4 GPUs free"),
    ],
)
def test_a_dev_environment_that_does_not_come_up_is_told_with_the_cluster_s_reason(
    spec: dict[str, Any], conditions: list[tuple[str, ...]], said: str
) -> None:
    listed = [dict(zip(("type", "status", "message", "reason"), given, strict=False)) for given in conditions]
    api = put(Api(), {**a_job(DEV_ENVIRONMENT, type="Interactive", **spec), "status": {"conditions": listed}})
    with pytest.raises(InstallError, match=said):
        asyncio.run(until_up(api, "lockstep", 2, lambda text: None, seconds=0.1))


def dev_environment_of(api: Api, done: Sent, printed: pytest.CaptureFixture[str]) -> tuple[str, bool]:
    """What a deployment that has `sent` this prints of its dev environment, and whether there is one afterwards."""
    plan = planned(Verb(), "local", Mode.TCP)
    with Progress() as progress, pytest.MonkeyPatch.context() as patched:
        patched.setattr("lockstep.cli.clusters.deploy.READY_SECONDS", 0.1)
        assert not asyncio.run(_start_dev_environment(api, plan, done, progress))
    return printed.readouterr().out, called(dev_environment(plan.profile, plan.namespace)) in api.objects


def test_no_dev_environment_is_made_without_what_jobs_need(capsys: pytest.CaptureFixture[str]) -> None:
    namespace = {"kind": "Namespace", "metadata": {"name": "lockstep"}}
    api = put(Api(cluster_wide=False), namespace)
    printed, is_there = dev_environment_of(api, sent(api), capsys)
    assert "NOT MADE: there is no CustomResourceDefinition " in printed and "repeat your command once an administrator" in printed
    api = Api()
    sent(api)
    api.cluster_wide = False
    left = sent(api)
    unseen, is_made = dev_environment_of(api, left, capsys)
    assert "NOT MADE: no operator is to be seen in namespace lockstep-system; repeat" in unseen and not (is_there or is_made)


class Served(Api):
    """With an operator that doesn't know the cluster, and whose Lease everybody may read."""

    accepted: ClassVar = {
        "type": "Accepted",
        "status": "False",
        "reason": "ClusterNotFound",
        "message": "there is no TrainingCluster local",
    }

    async def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        if kind == "Lease":
            return {"metadata": {"name": name}}
        item = await super().get(kind, namespace, name)
        return {**item, "status": {"conditions": [self.accepted]}} if item is not None and kind == "TrainingJob" else item


def test_a_dev_environment_whose_cluster_the_operator_lacks_is_removed_again(capsys: pytest.CaptureFixture[str]) -> None:
    api = Served()
    sent(api)
    api.cluster_wide = False
    printed, is_there = dev_environment_of(api, sent(api), capsys)
    assert "REMOVED again: ml-dev-env is not accepted: there is no TrainingCluster local; repeat your command" in printed and not is_there


def test_a_dev_environment_stays_where_its_operator_was_just_sent_and_the_leader_before_it_knows_no_cluster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    everything = sent(api := Served())
    own = Sent(tuple(item for item in everything.objects if item["kind"] != "TrainingCluster"), ())  # as of --namespace-only
    printed, is_there = dev_environment_of(api, own, capsys)
    assert "NOT READY: ml-dev-env is not accepted: there is no TrainingCluster local" in printed and is_there


def test_a_dev_environment_that_may_not_be_removed_again_is_told_as_not_ready(capsys: pytest.CaptureFixture[str]) -> None:
    class Keeping(Served):
        async def delete(self, *_: Any, **__: Any) -> None:
            raise ApiError(403, "Forbidden", "no")

    api = Keeping()
    sent(api)
    api.cluster_wide = False
    printed, is_there = dev_environment_of(api, sent(api), capsys)
    assert "NOT READY: ml-dev-env is not accepted: there is no TrainingCluster local" in printed and is_there


@pytest.mark.parametrize(
    ("mode", "kind", "name", "is_needed"),
    [
        (Mode.TCP, "RoleBinding", "lockstep-rdma", False),
        (Mode.RDMA, "RoleBinding", "lockstep-rdma", True),
        (Mode.AUTO, "RoleBinding", "lockstep-rdma", True),
        (Mode.TCP, "ServiceAccount", "ml-dev-sa", True),
        (Mode.TCP, "ConfigMap", "x", False),
    ],
)
def test_a_dev_environment_needs_the_right_to_lock_memory_only_for_rdma(mode: Mode, kind: str, name: str, is_needed: bool) -> None:
    plan = planned(Verb(), "barcelona", mode)
    item = {"kind": kind, "metadata": {"name": name, "namespace": plan.namespace}}
    elsewhere = {"kind": "ServiceAccount", "metadata": {"name": name, "namespace": "theirs"}}
    left = Sent((), (Left(elsewhere, State.MISSING), Left(item, State.MISSING)))
    why = asyncio.run(lacking(Served(), plan.profile, plan.namespace, "lockstep-system", left))
    assert why == (f"there is no {called(item)}" if is_needed else "")


@pytest.mark.parametrize(
    ("message", "said"), [('configmap "none" not found', "can't start: "), ("mount.nfs: Connection timed out", "is not up after")]
)
def test_a_dev_environment_whose_volume_may_come_late_is_waited_for(message: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.platforms.clusters.waits.STUCK_SECONDS", 0.0)
    state = {"type": "RanksReady", "status": "False", "reason": "VolumeNotMounted", "message": f"0 of 2 pods run: {message}"}
    api = put(Api(), {**a_job(DEV_ENVIRONMENT, type="Interactive"), "status": {"conditions": [state]}})
    with pytest.raises(InstallError, match=f"{said}.*{message}"):
        asyncio.run(until_up(api, "lockstep", 2, lambda text: None, seconds=0.1))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("0 of 2 pods run", "2 of 2 pods run"),
        ("0 of 2 pods created", "2 of 2 pods run"),
        ("0 of 2 ranks ready", "2 of 2 pods run: 0 of 2 ranks ready"),
        ("", "2 of 2 pods run"),
    ],
)
def test_pods_are_counted_once(message: str, expected: str) -> None:
    status = {"conditions": [{"type": "Progressing", "status": "False", "message": message}]}
    assert how_far(2, 2, status) == expected


def test_a_network_that_the_profile_names_and_the_namespace_lacks_is_told_with_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(Verb(), "barcelona", Mode.RDMA)
    names = [rail.network for rail in plan.profile.spec.network.rdma.rails]
    api = Api()
    for name, namespace in zip(names, ["theirs", *([plan.namespace] * (len(names) - 1))], strict=True):
        put(api, {"kind": "NetworkAttachmentDefinition", "metadata": {"name": name, "namespace": namespace}})
    with Progress() as progress:
        assert not asyncio.run(_rails_are_there(api, plan, progress))
        told = capsys.readouterr().out
        assert f"MISSING: there is no NetworkAttachmentDefinition {names[0]} in namespace {plan.namespace}" in told
        assert f"kubectl get net-attach-def {names[0]} -n theirs" in told and names[1] not in told
        assert asyncio.run(_rails_are_there(api, planned(Verb(), "barcelona", Mode.TCP), progress))
        put(api, {"kind": "NetworkAttachmentDefinition", "metadata": {"name": names[0], "namespace": plan.namespace}})
        assert asyncio.run(_rails_are_there(api, plan, progress))


def operator_waiting(image: str, reason: str) -> Api:
    """An operator whose pod is still of `image`, and waits for `reason`."""
    metadata = {"name": "lockstep-operator", "namespace": "lockstep-system", "uid": "u"}
    waiting = {"name": "operator", "state": {"waiting": {"reason": reason, "message": "pull access denied"}}}
    spec = {"nodeName": "n", "containers": [{"image": image}]}
    return put(
        Api(),
        {"kind": "Deployment", "metadata": metadata, "spec": {"replicas": 1, "template": {"spec": {"containers": [{"image": "new:1"}]}}}},
        {"kind": "Pod", "metadata": metadata, "spec": spec, "status": {"containerStatuses": [waiting]}},
    )


def test_the_doctor_names_an_image_of_the_operator_that_can_not_be_pulled() -> None:
    api = operator_waiting("new:1", "ImagePullBackOff")
    (deployment,) = [item for name, item in api.objects.items() if name.startswith("Deployment ")]
    assert asyncio.run(operator_trouble(api, deployment)).startswith("the operator's image new:1 can't be pulled (pull access denied): ")


def test_an_image_of_the_operator_that_can_not_be_pulled_ends_the_wait_with_what_to_type() -> None:
    with pytest.raises(
        InstallError,
        match=(
            r"image new:1 can't be pulled \(pull access denied\): .*lockstep build operator --tag .* --push.*lockstep deploy CLUSTER"
            r" --image"
        ),
    ):
        asyncio.run(install.until_ready(operator_waiting("new:1", "ErrImagePull"), "lockstep-system", "lockstep-operator", seconds=60))


@pytest.mark.parametrize(
    ("image", "reason", "words"),
    [
        ("old:1", "ErrImagePull", "pull access denied"),
        ("new:1", "ImagePullBackOff", "pull access denied"),
        ("new:1", "ContainerCreating", "kubectl describe pods -n lockstep-system says more"),
    ],
)
def test_a_pod_of_the_last_deployment_and_one_that_is_tried_again_are_waited_for(image: str, reason: str, words: str) -> None:
    with pytest.raises(InstallError, match=f"not ready after 0 s: .*{words}"):
        asyncio.run(install.until_ready(operator_waiting(image, reason), "lockstep-system", "lockstep-operator", seconds=0.1))


def test_a_job_whose_pods_stay_is_told_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = {"kind": "Pod", "metadata": {"name": "ml-dev-env-0", "namespace": "lockstep"}}
    monkeypatch.setattr(remove, "GONE_SECONDS", 0.1)
    with pytest.raises(install.InstallError, match="pods of deleted jobs are still there after 0 s: ml-dev-env-0"):
        asyncio.run(remove.remove_dev_environment(put(Api(), a_job(DEV_ENVIRONMENT), pod), "lockstep", lambda text: None))


def test_clean_says_what_it_may_not_delete_and_removes_nothing_without_the_right_to_the_dev_environment(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(api, a_job(DEV_ENVIRONMENT), {"kind": "ServiceAccount", "metadata": {"name": "ml-dev-sa", "namespace": "lockstep"}})
    monkeypatch.setattr(Api, "_may", lambda self, resource, namespace: resource != "trainingjobs")
    with pytest.raises(Failed, match="you may not delete jobs of namespace lockstep, and nothing was removed"):
        clean.clean(TargetOptions(), "local")
    assert len(api.objects) == 2
    monkeypatch.setattr(Api, "_may", lambda self, resource, namespace: resource != "serviceaccounts")
    clean.clean(TargetOptions(), "local")
    assert "ServiceAccount lockstep/ml-dev-sa stays: you may not delete it" in capsys.readouterr().out
    assert set(api.objects) == {"ServiceAccount lockstep/ml-dev-sa"}


NOT_ROOT = "container has runAsNonRoot and image will run as root"
STUCK_STATES = {
    "a configuration error": ({"waiting": {"reason": "CreateContainerConfigError", "message": NOT_ROOT}}, 0, NOT_ROOT),
    "no such program": ({"waiting": {"reason": "RunContainerError", "message": "exec: python9: not found"}}, 0, "python9: not found"),
    "a reason of tomorrow": ({"waiting": {"reason": "NobodyKnowsError", "message": "what it says"}}, 0, "NobodyKnowsError: what it says"),
    "a crash loop": ({"terminated": {"exitCode": 1, "message": "Traceback\nOSError: no key"}}, 2, "OSError: no key"),
}


def stuck_operator(state: Object, restarts: int) -> Api:
    api = operator_waiting("new:1", "ContainerCreating")
    (pod,) = [item for name, item in api.objects.items() if name.startswith("Pod ")]
    pod["status"]["containerStatuses"] = [{"name": "operator", "state": state, "restartCount": restarts}]
    return api


@pytest.mark.parametrize("why", STUCK_STATES)
def test_an_operator_that_can_t_start_ends_the_wait_with_the_kubelet_s_words(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state, restarts, words = STUCK_STATES[why]
    monkeypatch.setattr("lockstep.platforms.clusters.waits.STUCK_SECONDS", 0.3)
    told: list[str] = []
    with pytest.raises(InstallError, match="the operator can't start: pod lockstep-operator: ") as raised:
        asyncio.run(install.until_ready(stuck_operator(state, restarts), "lockstep-system", "lockstep-operator", told.append, 60))
    assert words in str(raised.value) and words in told[-1]
    assert ("platform" in str(raised.value)) == (words == NOT_ROOT)


NO_CA = 'MountVolume.SetUp failed for volume "kube-api-access-x" : configmap "kube-root-ca.crt" not found'


def test_an_operator_whose_volume_lacks_an_object_ends_the_wait_only_while_the_api_server_lacks_it_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lockstep.platforms.clusters.waits.STUCK_SECONDS", 0.3)
    api = stuck_operator({"waiting": {"reason": "ContainerCreating"}}, 0)
    event = {"reason": "FailedMount", "message": NO_CA, "involvedObject": {"uid": "u"}}
    put(api, {"kind": "Event", "metadata": {"name": "e", "namespace": "lockstep-system"}, **event})
    with pytest.raises(InstallError, match=r"the operator can't start: pod lockstep-operator: MountVolume.*; kube-controller-manager"):
        asyncio.run(install.until_ready(api, "lockstep-system", "lockstep-operator", seconds=60))
    put(api, {"kind": "ConfigMap", "metadata": {"name": "kube-root-ca.crt", "namespace": "lockstep-system"}})
    with pytest.raises(InstallError, match="not ready after 1 s: pod lockstep-operator: MountVolume"):
        asyncio.run(install.until_ready(api, "lockstep-system", "lockstep-operator", seconds=0.6))


READINESS = "Readiness probe failed: HTTP probe failed with statuscode: 503"


@pytest.mark.parametrize(
    ("state", "event", "words"),
    [
        ({"running": {}}, READINESS, f"pod lockstep-operator: {READINESS}$"),
        (
            {"waiting": {"reason": "ContainerCreating"}},
            "",
            r"pod lockstep-operator: containers with unready status: \[operator\] \(ContainerCreating\)$",
        ),
    ],
)
def test_an_operator_that_runs_and_is_never_ready_or_pulls_for_long_is_told_in_the_cluster_s_words(
    state: Object, event: str, words: str
) -> None:
    api = stuck_operator(state, 0)
    (pod,) = [item for name, item in api.objects.items() if name.startswith("Pod ")]
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False", "message": "containers with unready status: [operator]"}]
    if event:
        unhealthy = {"reason": "Unhealthy", "type": "Warning", "message": event, "involvedObject": {"uid": "u"}}
        put(api, {"kind": "Event", "metadata": {"name": "e", "namespace": "lockstep-system"}, **unhealthy})
    with pytest.raises(InstallError, match=f"not ready after 0 s: {words}"):
        asyncio.run(install.until_ready(api, "lockstep-system", "lockstep-operator", seconds=0.1))


def test_an_operator_that_crashed_once_or_is_being_made_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.platforms.clusters.waits.STUCK_SECONDS", 0.0)
    for state in ({"terminated": {"exitCode": 1}}, {"waiting": {"reason": "ContainerCreating"}}):
        with pytest.raises(InstallError, match="is not ready after"):
            asyncio.run(install.until_ready(stuck_operator(state, 1), "lockstep-system", "lockstep-operator", seconds=0.3))


def test_pods_of_the_operator_that_are_refused_end_the_wait_with_the_policy_s_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.platforms.clusters.waits.STUCK_SECONDS", 0.3)
    api = stuck_operator({"running": {}}, 0)
    (deployment,) = [item for name, item in api.objects.items() if name.startswith("Deployment ")]
    message = 'pods "lockstep-operator-1" is forbidden: exceeded quota: q, requested: pods=1, used: pods=3, limited: pods=3'
    deployment["status"] = {"conditions": [{"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}]}
    with pytest.raises(InstallError, match="its pods can't be made: exceeded quota: q"):
        asyncio.run(install.until_ready(api, "lockstep-system", "lockstep-operator", seconds=60))


def test_a_cluster_file_of_openshift_is_refused_by_plain_kubernetes_before_anything_is_sent() -> None:
    plan = planned(Verb(), "barcelona", Mode.TCP)

    class Plain(Api):
        async def request(self, method: str, path: str, *args: Any, **more: Any) -> Object:
            if path == "/apis/security.openshift.io":
                raise ApiError(404, "NotFound", "the server could not find the requested resource")
            return await super().request(method, path, *args, **more)

        server = "https://10.0.0.1:6443"

    with pytest.raises(
        Failed, match=r"is OpenShift by its file.*https://10\.0\.0\.1:6443 has no security\.openshift\.io.*nothing was sent"
    ):
        asyncio.run(_refuse_platform(Plain(), plan))
    asyncio.run(_refuse_platform(Plain(), planned(Verb(), "local", Mode.TCP)))


def a_cluster(name: str, platform: str = "Kubernetes", default: bool = False) -> Object:
    annotations = {"lockstep.dev/is-default-cluster": "true"} if default else {}
    return {"kind": "TrainingCluster", "metadata": {"name": name, "annotations": annotations}, "spec": {"platform": platform}}


def job_of(name: str, cluster: str | None, **status: Any) -> Object:
    spec = {} if cluster is None else {"cluster": cluster}
    return {"kind": "TrainingJob", "metadata": {"name": name, "namespace": "ml"}, "spec": spec, "status": status}


def test_a_cluster_is_used_by_jobs_that_name_it_or_mean_the_default_and_have_not_ended() -> None:
    ended = {"conditions": [{"type": "Failed", "status": "True"}]}
    jobs = [job_of("a", "mine"), job_of("b", "local"), job_of("c", None), job_of("d", "mine", **ended)]
    for is_default, expected in ((True, ["a", "c"]), (False, ["a"])):
        clusters = [a_cluster("mine", default=is_default), a_cluster("local")]
        assert [job["metadata"]["name"] for job in jobs_using("mine", clusters, jobs)] == expected
    assert jobs_using("mine", [], []) == []


RIGHTS = ["SecurityContextConstraints lockstep-rdma", "ClusterRole lockstep-rdma"]


@pytest.mark.parametrize(
    ("others", "kept", "goes"),
    [
        ([a_cluster("local")], [], [*RIGHTS, "RoleBinding lockstep-system/lockstep-image-puller-ml"]),
        ([a_cluster("prod", "OpenShift")], [], ["RoleBinding lockstep-system/lockstep-image-puller-ml"]),
        ([a_cluster("local")], [job_of("x", "local")], RIGHTS),
        ([a_cluster("local")], ["puller", "role"], ["SecurityContextConstraints lockstep-rdma"]),
    ],
)
def test_rights_go_with_the_last_cluster_that_may_need_them(others: list[Object], kept: list[Any], goes: list[str]) -> None:
    objects = [
        {"kind": "Deployment", "metadata": {"name": "lockstep-operator", "namespace": "lockstep-system"}},
        {"kind": "ClusterRole", "metadata": {"name": "lockstep-operator"}},
        {"kind": "ServiceAccount", "metadata": {"name": "ml-dev-sa", "namespace": "ml"}},
        a_cluster("mine", "OpenShift"),
        {"kind": "SecurityContextConstraints", "metadata": {"name": "lockstep-rdma"}},
        {"kind": "ClusterRole", "metadata": {"name": "lockstep-rdma"}},
        puller("ml"),
    ]
    named = {"puller": puller("ml"), "role": objects[5]}
    there = [a_cluster("mine", "OpenShift"), *others]
    found = objects_of_cluster(objects, "mine", "ml", there, [named[one] if isinstance(one, str) else one for one in kept])
    assert [called(item) for item in found] == ["TrainingCluster mine", *goes]


def test_one_cluster_of_two_is_removed_once_no_job_uses_it(
    api: Api, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent(api)
    other = a_cluster("other", default=True)
    put(api, other, job_of("x", "local"))
    own = planned(Verb(), "local", Mode.TCP).objects
    asyncio.run(write_record(api, Record(deployment_of([other], "other"), deployment_of(own, "local"))))
    before = set(api.objects)
    with pytest.raises(ConfigError, match=r"jobs use TrainingCluster local \(ml/x\): delete them first"):
        clean.uninstall(TargetOptions(), "local", cluster_only=True, yes=True)
    assert set(api.objects) == before
    del api.objects["TrainingJob ml/x"]
    remembered.remember_forced("local", "https://elsewhere")
    monkeypatch.setattr(Api, "server", "https://elsewhere")
    clean.uninstall(TargetOptions(), "local", cluster_only=True, yes=True)
    assert before - set(api.objects) == {"TrainingCluster local", "TrainingJob ml/x"}
    printed = capsys.readouterr().out
    assert "TrainingCluster local is removed; Lockstep stays, with other.\n" in printed
    assert "cluster clean" not in printed, "the checkout forgets that it was forced there"
    assert asyncio.run(read_record(api)).previous is None, "a rollback would bring it back"
    assert not remembered.was_forced("local", "https://elsewhere")
    clean.uninstall(TargetOptions(), "local", cluster_only=True, yes=True)
    printed = capsys.readouterr().out
    assert "TrainingCluster local is not on the cluster; Lockstep stays" in printed and "lockstep cluster clean local\n" in printed
    with pytest.raises(ConfigError, match="leave out one of them"):
        clean.uninstall(TargetOptions(), "local", jobs=True, cluster_only=True, yes=True)


def test_uninstalling_one_of_two_without_the_rights_removes_nothing(api: Api) -> None:
    sent(api)
    put(api, a_cluster("other"))
    before = dict(api.objects)
    api._may = lambda resource, namespace: resource != "trainingclusters"  # type: ignore[method-assign]
    with pytest.raises(Failed, match="you may not delete TrainingCluster local, and nothing was removed"):
        clean.uninstall(TargetOptions(), "local", cluster_only=True, yes=True)
    assert api.objects == before


OLD_JOB: Object = {
    "apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x", "namespace": "ml"},
    "spec": {"clusterProfileName": "mine", "script": {"path": "a.py"}}, "status": {"profile": "mine"},
}  # fmt: skip
LOST = "TrainingJob ml/x would lose spec.clusterProfileName, status.profile"


def test_a_deployment_whose_crds_would_drop_stored_fields_is_refused_and_forced(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lockstep.cli.clusters.deploy.send_permitted", lambda *_: pytest.fail("it was sent"))
    api.objects[called(OLD_JOB)] = OLD_JOB
    plan = planned(Verb(), "local", Mode.TCP)
    with pytest.raises(Failed, match=f"nothing was sent:\n  {LOST}\nDeploy a version that has these fields"):
        asyncio.run(deploy.carry_out(plan, None, False))
    assert api.tried == []
    asyncio.run(refuse_losses(api, plan.objects, Progress(), force=True))
    assert f"losing       {LOST}" in capsys.readouterr().out
    with suppress(Exit):
        diff_deployment(plan.objects, None)
    assert f"! {LOST}\n" in capsys.readouterr().out


class Narrow(Api):
    """A person who may send CRDs and list what is in namespace lockstep."""

    def _may(self, resource: str, namespace: str) -> bool:
        return resource == "customresourcedefinitions" or super()._may(resource, namespace)

    async def list(self, kind: str, namespace: str | None = None, query: Mapping[str, str] | None = None) -> Object:
        if not self._may(KINDS[kind].plural, namespace or ""):
            raise ApiError(403, "Forbidden", "no")
        return await super().list(kind, namespace, query)


def test_a_diff_groups_jobs_whose_next_starts_differ_alike_and_leaves_out_those_that_have_ended(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def would_change(cluster: Any, item: Any) -> Any:
        return None

    monkeypatch.setattr("lockstep.cli.clusters.difference.would_change", would_change)
    accepted, ended = ([{"type": kind, "status": "True"}] for kind in ("Accepted", "Complete"))
    spec = {"nodes": 0, "script": {"path": "a.py"}}
    put(api, *(job_of(name, "local", conditions=accepted) | {"apiVersion": API_VERSION, "spec": spec} for name in "ab"))
    put(api, job_of("over", "local", conditions=[*accepted, *ended]), job_of("refused", "local"))
    with pytest.raises(Exit):
        diff_deployment(planned(Verb(), "local", Mode.TCP).objects, None)
    (line,) = (line for line in capsys.readouterr().out.split("~ at the next start of ")[1:])
    assert line == (
        "TrainingJob ml/a, TrainingJob ml/b\n"
        "    ! not accepted any more: the job can't be used: spec.nodes: must be greater than or equal to 1\n"
    )


def test_each_change_of_a_next_start_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    changed = (Change("run.nodes", 3, 2), Change("template.pod.spec.image", "b", "a"))
    print_next_starts([(job_of("a", None), changed), (job_of("b", None), changed), (job_of("c", None), changed[:1])])
    assert capsys.readouterr().out.splitlines() == [
        "~ at the next start of TrainingJob ml/a, TrainingJob ml/b", "    run.nodes: 2 → 3", '    template.pod.spec.image: "a" → "b"',
        "~ at the next start of TrainingJob ml/c", "    run.nodes: 2 → 3",
    ]  # fmt: skip


def job_without_nodes(namespace: str) -> Object:
    job = {"apiVersion": API_VERSION, "spec": {"nodes": 0}, "metadata": {"name": "x", "namespace": namespace}}
    return job_of("x", None, conditions=[{"type": "Accepted", "status": "True"}]) | job


@pytest.mark.parametrize(
    ("api", "scope", "namespaces", "all_seen"),
    [
        (Api(), None, ["lockstep", "ml"], True),
        (Api(), OWN, ["lockstep"], True),
        (Narrow(cluster_wide=False), OWN, ["lockstep"], True),
        (Narrow(cluster_wide=False), None, [], False),
    ],
)
def test_next_starts_are_of_jobs_of_the_deployed_operator_and_need_the_clusters_of_all(
    api: Api, scope: Scope | None, namespaces: list[str], all_seen: bool
) -> None:
    put(api, *map(job_without_nodes, ("lockstep", "ml")))
    found, seen = asyncio.run(next_starts(api, planned(Verb(), "local", Mode.TCP, scope=scope).objects))
    assert ([job["metadata"]["namespace"] for job, _ in found], seen) == (namespaces, all_seen)


def test_jobs_are_looked_at_where_they_may_be_listed_and_the_rest_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    api = Narrow(cluster_wide=False)
    here = {**OLD_JOB, "metadata": {"name": "x", "namespace": "lockstep"}}
    api.objects |= {called(item): item for item in (OLD_JOB, here)}
    objects = planned(Verb(), "local", Mode.TCP).objects
    asyncio.run(refuse_losses(api, objects, Progress(), force=True))
    told = capsys.readouterr().out
    assert "TrainingJob lockstep/x would lose" in told and LOST not in told
    assert told.count("of namespaces that you may not list") == 2


def test_who_may_not_send_the_crds_takes_nothing_away() -> None:
    api = Api(cluster_wide=False)
    api.objects[called(OLD_JOB)] = OLD_JOB
    assert asyncio.run(losses(api, planned(Verb(), "local", Mode.TCP).objects)) == ([], [])
