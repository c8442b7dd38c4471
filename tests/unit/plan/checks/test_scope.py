"""Where the operator may work: what is sent for named namespaces and for a single one, and which rights go when that changes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import OPERATOR_NAME, OPERATOR_NAMESPACE
from lockstep.cli.clusters.deploy import _refuse_what_lacks
from lockstep.cli.clusters.deploymentplan import Mode, chosen_scope, planned
from lockstep.cli.shared.places import Verb
from lockstep.plan.cluster.scope import EVERYWHERE, NAMED_BINDING, NOT_IN_A_NAMESPACE, OWN, PROFILE_CONFIG, PROFILE_KEY, Scope, scope_of
from lockstep.plan.ship.deploy import called
from lockstep.platforms.clusters.facts import unserved
from lockstep.platforms.clusters.send import remove_outdated
from lockstep.platforms.operator.operator import WATCHED, Settings, read_profile
from unit.cli.deploy.test_deploying import Api

Object = dict[str, Any]
NAMED = Scope(("lockstep", "team"))


def objects(scope: Scope | None, kind: str, name: str = "", cluster: str = "local") -> list[Object]:
    sent = planned(Verb(), cluster, Mode.TCP, scope=scope).objects
    return [item for item in sent if item["kind"] == kind and name in ("", item["metadata"]["name"])]


def environment(scope: Scope | None) -> dict[str, str]:
    (deployment,) = objects(scope, "Deployment")
    return {item["name"]: item.get("value", "") for item in deployment["spec"]["template"]["spec"]["containers"][0]["env"]}


def rules(scope: Scope | None, kind: str, name: str) -> list[Object]:
    (role,) = objects(scope, kind, name)
    return list(role["rules"])


def test_in_named_namespaces_the_same_rules_are_bound_there_and_nowhere_else() -> None:
    assert rules(NAMED, "ClusterRole", OPERATOR_NAME) == rules(None, "ClusterRole", OPERATOR_NAME)
    assert [b["metadata"]["name"] for b in objects(NAMED, "ClusterRoleBinding")] == [f"{OPERATOR_NAME}-cluster"]
    bound = objects(NAMED, "RoleBinding", NAMED_BINDING)
    assert [item["metadata"]["namespace"] for item in bound] == list(NAMED.namespaces)
    assert all(item["subjects"] == [{"kind": "ServiceAccount", "name": OPERATOR_NAME, "namespace": OPERATOR_NAMESPACE}] for item in bound)
    assert environment(NAMED)["LOCKSTEP_NAMESPACES"] == "lockstep,team"


@pytest.mark.parametrize("scope", [Scope((OPERATOR_NAMESPACE, "lockstep")), Scope(("lockstep",))])
def test_no_two_objects_have_one_name(scope: Scope | None) -> None:
    """Not even where jobs run beside the operator, or beside an operator of their own: what a RoleBinding grants can't be changed."""
    names = [called(item) for chosen in (scope, OWN) for item in planned(Verb(), "local", Mode.TCP, scope=chosen).objects]
    bindings = [name for name in names if name.startswith("RoleBinding")]
    assert len(bindings) == len(set(bindings))


@pytest.mark.parametrize("cluster", ["local", "barcelona"])
def test_jobs_find_in_every_named_namespace_what_they_need(cluster: str) -> None:
    home = planned(Verb(), cluster, Mode.AUTO).namespace
    sent = planned(Verb(), cluster, Mode.AUTO, scope=Scope((home, "team"))).objects
    places = {name: {item["kind"] for item in sent if item["metadata"].get("namespace") == name} for name in (home, "team")}
    assert places["team"] - {"PersistentVolumeClaim"} == places[home] - {"PersistentVolumeClaim"} >= {"ServiceAccount", "RoleBinding"}
    rdma = [item for item in sent if item["metadata"]["name"] == "lockstep-rdma" and item["kind"] == "RoleBinding"]
    assert {(b["metadata"]["namespace"], b["subjects"][0]["namespace"]) for b in rdma} == (
        {(home, home), ("team", "team")} if cluster == "barcelona" else set()
    )
    pulls = [item["metadata"]["name"] for item in sent if item["metadata"]["name"].startswith("lockstep-image-puller-")]
    assert pulls == ([f"lockstep-image-puller-{name}" for name in (home, "team")] if cluster == "barcelona" else [])


@pytest.mark.parametrize("cluster", ["local", "barcelona"])
def test_for_a_single_namespace_everything_is_in_it(cluster: str) -> None:
    sent = planned(Verb(), cluster, Mode.TCP, scope=OWN)
    assert {item["kind"] for item in sent.objects}.isdisjoint(NOT_IN_A_NAMESPACE)
    assert {item["metadata"]["namespace"] for item in sent.objects} == {sent.namespace}
    assert OPERATOR_NAMESPACE not in json.dumps([item for item in sent.objects if item["kind"] != "Deployment"])
    subjects = [subject for item in sent.objects if item["kind"] == "RoleBinding" for subject in item["subjects"]]
    assert {subject["namespace"] for subject in subjects} == {sent.namespace}


def test_a_single_namespace_s_operator_has_the_rules_that_are_needed_there_by_a_role() -> None:
    left_out = {"apiGroups": [""], "resources": ["pods"], "verbs": ["delete"]}  # lost Nodes are none of its business
    whole = rules(None, "ClusterRole", OPERATOR_NAME)
    assert left_out in whole
    assert rules(OWN, "Role", f"{OPERATOR_NAME}-jobs") == [rule for rule in whole if rule != left_out]
    assert rules(OWN, "Role", OPERATOR_NAME) == rules(None, "Role", OPERATOR_NAME)
    granted = {resource for item in objects(OWN, "Role") for rule in item["rules"] for resource in rule["resources"]}
    assert granted.isdisjoint({"nodes", "trainingclusters", "tokenreviews", "subjectaccessreviews"})


def test_its_settings_lead_to_its_namespace_and_its_profile(tmp_path: Any) -> None:
    settings = Settings.from_environment(environment(OWN))
    assert (settings.namespace, settings.namespaces, settings.metrics_port) == ("lockstep", ("lockstep",), 0)
    assert settings.report_url == "https://lockstep-operator.lockstep.svc/v1/report"
    assert {watched.kind for watched in WATCHED} - {watched.kind for watched in settings.watched} == {"Node", "TrainingCluster"}
    assert settings.places("Pod") == ("lockstep",)
    (config,) = objects(OWN, "ConfigMap", PROFILE_CONFIG)
    path = tmp_path / PROFILE_KEY
    path.write_text(config["data"][PROFILE_KEY])
    (profile,) = objects(None, "TrainingCluster")
    read = read_profile(path)
    assert read["spec"] == profile["spec"] and read["metadata"]["annotations"] == profile["metadata"]["annotations"]


def test_for_the_whole_cluster_everything_is_listed_everywhere() -> None:
    settings = Settings.from_environment(environment(None))
    assert (settings.watched, settings.places("Pod"), settings.places("Node")) == (WATCHED, (None,), (None,))
    named = Settings.from_environment(environment(NAMED))
    assert (named.watched, named.places("Pod"), named.places("Node")) == (WATCHED, NAMED.namespaces, (None,))


def test_another_profile_starts_a_single_namespace_s_operator_again() -> None:
    def mark(mode: Mode) -> str:
        (deployment,) = (item for item in planned(Verb(), "barcelona", mode, scope=OWN).objects if item["kind"] == "Deployment")
        return str(deployment["spec"]["template"]["metadata"]["annotations"]["lockstep.dev/cluster-hash"])

    assert mark(Mode.TCP) == mark(Mode.TCP) != mark(Mode.RDMA)


@pytest.mark.parametrize("scope", [None, NAMED, OWN])
def test_what_was_chosen_is_read_back_from_the_deployment(scope: Scope | None) -> None:
    (deployment,) = objects(scope, "Deployment")
    assert scope_of(deployment) == planned(Verb(), "local", Mode.TCP, scope=scope).scope


@pytest.mark.parametrize(
    ("namespaces", "only", "chosen"),
    [
        (None, None, None),
        ("all", None, EVERYWHERE),
        ("a,b", None, Scope(("a", "b"))),
        ("b, a,b", None, Scope(("b", "a"))),
        (None, True, OWN),
    ],
)
def test_the_command_line_says_where(namespaces: str | None, only: bool | None, chosen: Scope | None) -> None:
    assert chosen_scope(namespaces, only) == chosen


@pytest.mark.parametrize(
    ("namespaces", "only", "said"),
    [
        ("a", True, "can't be combined"),
        ("a,,b", None, "'' is no namespace's name"),
        ("a,B", None, "'B' is no namespace's name"),
        ("*", None, "'\\*'"),
    ],
)
def test_what_can_t_be_meant_is_refused(namespaces: str, only: bool | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        chosen_scope(namespaces, only)


def test_the_cluster_file_s_own_namespace_has_to_be_among_them() -> None:
    with pytest.raises(ConfigError, match="own namespace lockstep is not among team"):
        planned(Verb(), "local", Mode.TCP, scope=Scope(("team",)))


def test_a_single_namespace_s_operator_serves_no_metrics() -> None:
    with pytest.raises(ConfigError, match="--monitoring: the operator of one namespace serves no metrics"):
        planned(Verb(), "local", Mode.TCP, scope=OWN, monitoring=True)


def api_with(scope: Scope | None) -> Api:
    api = Api()
    for item in planned(Verb(), "local", Mode.TCP, scope=scope).objects:
        asyncio.run(api.apply(item))
    return api


def rights(api: Api) -> set[str]:
    return {name for name in api.objects if name.split()[0] in ("ClusterRoleBinding", "RoleBinding") and name.endswith("-operator")}


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, NAMED), (NAMED, None), (NAMED, Scope(("lockstep",))), (Scope(("lockstep",)), NAMED), (None, None), (NAMED, NAMED)],
)
def test_rights_that_another_choice_gave_are_taken_away(before: Scope | None, after: Scope | None) -> None:
    api = api_with(before)
    for item in planned(Verb(), "local", Mode.TCP, scope=after).objects:
        asyncio.run(api.apply(item))
    assert asyncio.run(remove_outdated(api, planned(Verb(), "local", Mode.TCP, scope=after).scope))[1] == []
    assert rights(api) == rights(api_with(after))


def refusal(api: Api, scope: Scope | None = OWN) -> str:
    with pytest.raises(Failed) as refused:
        asyncio.run(_refuse_what_lacks(api, planned(Verb(), "local", Mode.TCP, scope=scope)))
    return "\n".join(map(str, refused.value.args))


def test_without_the_crds_the_administrator_s_command_is_told() -> None:
    said = refusal(Api(cluster_wide=False))
    assert "an administrator of the cluster types this once, with the files that were just written; then repeat your command:" in said
    assert said.count("\n  kubectl apply --server-side") == 2 and "/deploy/local/definitions.yaml" in said


def test_jobs_that_another_operator_runs_are_not_taken_over() -> None:
    api = Api(cluster_wide=False)
    api.objects["CustomResourceDefinition x"] = {"kind": "CustomResourceDefinition", "metadata": {"name": "x"}}
    job = {"kind": "TrainingJob", "metadata": {"name": "x", "namespace": "lockstep"}, "status": {"nodes": 2}}
    api.objects["TrainingJob lockstep/x"] = job
    assert "the pods of x report to the operator of the whole cluster" in refusal(api)
    account = {"kind": "ServiceAccount", "metadata": {"name": OPERATOR_NAME, "namespace": "lockstep"}}
    api.objects[f"ServiceAccount lockstep/{OPERATOR_NAME}"] = account
    asyncio.run(_refuse_what_lacks(api, planned(Verb(), "local", Mode.TCP, scope=OWN)))


def test_a_named_namespace_that_is_not_there_is_refused_before_anything_is_sent() -> None:
    api = Api()
    assert "namespace team doesn't exist, and nothing was sent: kubectl create namespace team" in refusal(api, NAMED)
    put(api, "Namespace", "team")
    asyncio.run(_refuse_what_lacks(api, planned(Verb(), "local", Mode.TCP, scope=NAMED)))


@pytest.mark.parametrize("scope", [None, NAMED])
def test_a_namespace_s_own_operator_has_to_go_before_another_works_there(scope: Scope | None) -> None:
    api = api_with(OWN)
    put(api, "Namespace", "team")
    assert "remove the one in lockstep first (lockstep cluster uninstall local)" in refusal(api, scope)
    del api.objects[f"Deployment lockstep/{OPERATOR_NAME}"]
    assert f"remove the one in lockstep first (kubectl delete serviceaccount {OPERATOR_NAME} -n lockstep)" in refusal(api, scope)


def put(api: Api, kind: str, name: str, **more: Any) -> None:
    item = {"kind": kind, "metadata": {"name": name, **more}}
    api.objects[called(item)] = item


@pytest.mark.parametrize(
    ("scope", "namespace", "said"),
    [
        (None, "team", ""),
        (OWN, "lockstep", ""),
        (NAMED, "team", ""),
        (
            NAMED,
            "c",
            "the operator works in lockstep, team only: an administrator adds c (lockstep deploy CLUSTER --namespaces lockstep,team,c)",
        ),
    ],
)
def test_a_namespace_in_which_no_operator_works_is_told_who_changes_that(scope: Scope | None, namespace: str, said: str) -> None:
    answer = asyncio.run(unserved(api_with(scope), namespace))
    assert answer.startswith(said) and bool(answer) == bool(said)


def test_where_no_operator_works_is_seen_by_what_is_missing() -> None:
    assert asyncio.run(unserved(Api(), "team")).startswith("no operator is installed")
    api = api_with(NAMED)
    del api.objects[f"RoleBinding team/{NAMED_BINDING}"]
    assert "has lost its rights in namespace team" in asyncio.run(unserved(api, "team"))
    put(api, "ServiceAccount", OPERATOR_NAME, namespace="lockstep")
    assert f"kubectl delete serviceaccount {OPERATOR_NAME} -n lockstep" in asyncio.run(unserved(api, "lockstep"))


def test_named_scopes_have_names() -> None:
    assert [Scope().choice, Scope(("a", "b")).choice, Scope(("a",), own=True).choice] == ["", "--namespaces a,b", "--namespace-only"]
