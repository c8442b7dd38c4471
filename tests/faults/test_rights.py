"""The operator has every right that it uses and uses every right that it has, by the API server's own audit log, in each way of installing
it.

It authenticates as its service account. What no scenario can show is in a list, with a reason for each.
"""

from __future__ import annotations

import asyncio
import http.client
import ssl
from base64 import b64encode
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config, dynamic

from golden.plan_cases import job as training_job
from golden.plan_cases import profile
from lockstep.api.names import OPERATOR_NAME, OPERATOR_NAMESPACE, TLS_SECRET, report_url
from lockstep.plan.cluster.scope import NAMED_BINDING, PROFILE_KEY, Scope
from lockstep.platforms.clusters.install import operator_objects
from lockstep.platforms.clusters.send import Sent, send_permitted
from lockstep.platforms.kubernetes.objects import objects
from lockstep.platforms.kubernetes.objects import prepare as prepare_run
from lockstep.platforms.operator.certificate import Certificates, renew
from lockstep_gang.contract.report import State
from lockstep_machine.network import free_ports
from support.checkout import ROOT
from support.clusters.cluster_jobs import Jobs, kubeconfig_of, prepare, until
from support.clusters.control_plane import Plane, connected, default_objects, local_profile
from support.clusters.operator_faults import SCENARIOS, Rig, is_complete, is_failed, is_suspended, rig_in, running
from support.clusters.played_job import JOB, PlayedJob
from support.clusters.rights_used import granted, unused, used
from support.in_process import lockstep

UNSEEN = {
    "update trainingjobs/finalizers.lockstep.dev": (
        "admission asks for it at each create of a child (OwnerReferencesPermissionEnforcement, "
        "which this API server has switched on): no request of the operator's, so not in the log; without it every create is refused"
    ),
}
"""Right → why no request shows it."""
USER_ROLES = ("lockstep-edit", "lockstep-view", "lockstep-admin")
NAMED = Scope(("named", "team"))
"""Each test has namespaces of its own: claims of jobs stay there."""
FIELDS = {"ca_cert": "ca.crt", "ca_key": "ca.key", "tls_cert": "tls.crt", "tls_key": "tls.key"}


def test_installed_for_the_whole_cluster(tmp_path: Path, plane: Plane) -> None:
    with rig_in(tmp_path, plane, LOCKSTEP_METRICS_PORT=str(free_ports(1)[0])) as rig:
        whole_life(rig, OPERATOR_NAMESPACE, "")
        assert wrong(rig, OPERATOR_NAMESPACE) == ([], [])


@pytest.mark.long
def test_installed_for_named_namespaces(tmp_path: Path, plane: Plane) -> None:
    """Outside of them it may do nothing, and doesn't try."""
    settings = {"LOCKSTEP_NAMESPACES": ",".join(NAMED.namespaces), "LOCKSTEP_METRICS_PORT": str(free_ports(1)[0])}
    with rig_in(tmp_path, plane, lambda: sent(NAMED), **settings) as rig:
        elsewhere = not_served(rig)
        whole_life(rig, OPERATOR_NAMESPACE, "named")
        with rig.job("team") as job:
            short_life(job)
        assert elsewhere.job(JOB).get("status") is None
        elsewhere.end(JOB)
        assert wrong(rig, OPERATOR_NAMESPACE, "team") == ([], [])


def test_an_admin_of_one_namespace_can_t_stop_the_operator_for_the_others(tmp_path: Path, plane: Plane) -> None:
    """Whoever holds `admin` there may delete the operator's RoleBinding, at a moment when another replica begins to lead."""
    settings = {"LOCKSTEP_NAMESPACES": ",".join(NAMED.namespaces)}
    with rig_in(tmp_path, plane, lambda: sent(NAMED), **settings) as rig:
        folder = tmp_path / "person"
        folder.mkdir()
        person = kubeconfig_of("admin", Jobs(rig.api, "team"), plane.kubeconfig, folder)
        with config.new_client_from_config(str(person)) as connection:
            roles = client.RbacAuthorizationV1Api(connection)
            until("admins may delete bindings", lambda: is_done(lambda: roles.delete_namespaced_role_binding(NAMED_BINDING, "team")))
        rig.operator.start()
        with rig.job("named") as job:
            short_life(job)


def test_installed_in_a_single_namespace(tmp_path: Path, plane: Plane) -> None:
    """It has Roles there and nothing else, sees neither Nodes nor clusters, and its jobs live all the same."""
    objects = sent(Scope(("lockstep",), own=True))
    profile = tmp_path / PROFILE_KEY
    profile.write_text(next(item["data"][PROFILE_KEY] for item in objects if PROFILE_KEY in item.get("data", {})))
    settings = {
        "LOCKSTEP_NAMESPACE": "lockstep", "LOCKSTEP_NAMESPACES": "lockstep", "LOCKSTEP_CLUSTER": str(profile),
        "LOCKSTEP_REPORT_URL": report_url("lockstep"),
    }  # fmt: skip
    with rig_in(tmp_path, plane, lambda: objects, "lockstep", **settings) as rig:
        elsewhere = not_served(rig)
        whole_life(rig, "lockstep", "lockstep")
        with rig.job("lockstep") as job:
            short_life(job)
            assert not job.jobs.job(JOB)
        assert elsewhere.job(JOB).get("status") is None
        elsewhere.end(JOB)
        assert {right.namespace for right in granted(rig.api.client, OPERATOR_NAME, "lockstep")} == {"lockstep"}
        assert wrong(rig, "lockstep") == ([], [])


def test_an_admin_of_the_namespace_may_send_all_of_it(tmp_path: Path, plane: Plane) -> None:
    """Once an administrator of the cluster has put there what the command names that `deploy` prints."""
    scope = Scope(("theirs",), own=True)
    once = [item for item in default_objects() if item["kind"] == "CustomResourceDefinition" or item["metadata"]["name"] in USER_ROLES]
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "theirs"}}
    plane.install([])
    with config.new_client_from_config(str(plane.kubeconfig)) as connection:
        roles = client.RbacAuthorizationV1Api(connection)
        until("admins have no rights of an earlier installation", lambda: "lockstep.dev" not in str(roles.read_cluster_role("admin").rules))
        plane.install([*once, space])
        until("admins may give the rights", lambda: "trainingjobs/finalizers" in str(roles.read_cluster_role("admin").rules))
        api = dynamic.DynamicClient(connection)
        person = kubeconfig_of("admin", Jobs(api, "theirs"), plane.kubeconfig, tmp_path)

        async def send() -> Sent:
            async with await connected(person) as cluster:
                return await send_permitted(cluster, own, lambda text: None)

        own = sent(scope, once=False)[1:]
        plane.installed += own
        assert asyncio.run(send()).left == ()


def test_an_admin_of_a_namespace_sees_and_stops_a_run_where_there_are_no_crds(
    tmp_path: Path, plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without CRDs the API server refuses TrainingJobs before it finds that there are none, for all but the cluster's administrator."""
    plane.install([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "alone"}}])
    with config.new_client_from_config(str(plane.kubeconfig)) as connection:
        api = dynamic.DynamicClient(connection)
        client.ApiextensionsV1Api(connection).delete_collection_custom_resource_definition()
        jobs = Jobs(api, "alone")
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig_of("admin", jobs, plane.kubeconfig, tmp_path)))
        until("admins have their rights", lambda: lockstep("get", "-n", "alone").stdout == "there is no TrainingJob in namespace alone\n")
        for verb in ("get", "why", "top", "stop"):
            assert "there is no TrainingJob x in namespace alone: it has none" in lockstep(verb, "x", "-n", "alone").stderr
        first, *others = objects(prepare_run(training_job(), profile(), "alone"))
        owner = jobs.create(first)
        for item in others:
            jobs.create(item)
        assert "x      0/2" in lockstep("get", "-n", "alone").stdout
        for words in (("why", "x"), ("top", "x", "--once")):
            assert "0 of 2 pods created" in lockstep(*words, "-n", "alone").stdout
        assert lockstep("stop", "x", "-n", "alone").stdout == "x: the run is removed, its claims stay\n"
        assert jobs.get("ConfigMap", owner["metadata"]["name"]) is None


def sent(scope: Scope, once: bool = True) -> list[dict[str, Any]]:
    """As `lockstep deploy local` sends them for `scope`, beside what an administrator has put there once."""
    objects = operator_objects(local_profile(), "operator:1", namespace=scope.namespaces[0], manifests=ROOT / "manifests", scope=scope)
    spaces = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in scope.namespaces]
    crds = [item for item in default_objects() if item["kind"] == "CustomResourceDefinition"] if scope.own and once else []
    return [*crds, *spaces, *objects]


def not_served(rig: Rig) -> Jobs:
    """A job in a namespace that the operator has no rights in."""
    made = client.CoreV1Api(rig.api.client).create_namespace({"metadata": {"generateName": "elsewhere-"}})
    jobs = prepare(rig.api, made.metadata.name)
    jobs.start(JOB)
    return jobs


def short_life(job: PlayedJob) -> None:
    """Created, running, deleted; it says what its operator can't see."""
    running(job)
    healthy = job.jobs.condition(JOB, "NodesHealthy")
    is_own = job.jobs.get("ServiceAccount", OPERATOR_NAME) is not None
    assert (healthy["status"], healthy["reason"]) == (("Unknown", "NodesNotSeen") if is_own else ("True", "AllNodesReady"))
    job.jobs.end(JOB)
    job.until("gone", lambda: is_gone(job))


def is_done(ask: Callable[[], object]) -> bool:
    """Not as long as it is forbidden: the built-in roles get their rules a moment after the API server began."""
    try:
        ask()
    except client.ApiException as error:
        assert error.status == 403
        return False
    return True


def is_gone(job: PlayedJob) -> bool:
    """With all that was made for it; other objects may be there."""
    left = (name for kind in ("StatefulSet", "Pod", "Secret", "Service", "NetworkPolicy", "ConfigMap") for name in job.uids(kind))
    return not job.jobs.job(JOB) and not any(f"{name}-".startswith(f"{JOB}-") for name in left)


def wrong(rig: Rig, home: str, beside: str = "-") -> tuple[list[str], list[str]]:
    """Rights that were asked for and not granted, and rights that were granted and not used, but in namespace `beside`: it has the same as
    another.
    """
    uses = used(rig.plane.audit_log, OPERATOR_NAME, home, rig.audited)
    grants = granted(rig.api.client, OPERATOR_NAME, home)
    idle = {
        right for right in unused(grants, uses) if not any(str(right).startswith(text) for text in UNSEEN) and right.namespace != beside
    }
    return sorted(str(use) for use, allowed in uses.items() if not allowed), sorted(map(str, idle))


def whole_life(rig: Rig, home: str, namespace: str) -> None:
    """Everything that an operator does for jobs and for itself. `namespace`: where the jobs are; "": each in one of its own."""
    an_old_certificate(rig, home)
    with rig.job(namespace) as job:  # one gang through a whole life
        SCENARIOS["restart"].prepare(job)
        job.fail_and_start_again()
        job.until("the second attempt", job.runs)
        changed_by_hand(job)
        suspend(job)
        job.jobs.change(JOB, suspend=False, podTemplate={"schedulerName": "played", "labels": {"new": "run"}})
        job.until("resumed", job.runs)
        suspend(job)
        job.jobs.change(JOB, suspend=False, queueName="q")  # what nobody may change of a StatefulSet: another one is made
        job.until("started with a queue", job.runs)
        job.jobs.change(JOB, nodes=3)
        job.until("resized", lambda: job.nodes == 3 and job.runs())
        fail_and_retry(job)
        job.state = State.COMPLETE
        job.until("complete", lambda: is_complete(job))
        job.jobs.change(JOB, ttlSecondsAfterFinished=0)
        job.until("deleted after its end", lambda: not job.jobs.job(JOB))
    names_taken(rig, namespace)
    ask_for_metrics(rig)
    a_deleted_lease(rig, home)
    if home == OPERATOR_NAMESPACE:
        a_lost_node(rig, namespace)


def suspend(job: PlayedJob) -> None:
    job.jobs.change(JOB, suspend=True)
    job.until("suspended", lambda: is_suspended(job))


def changed_by_hand(job: PlayedJob) -> None:
    """The operator puts right what belongs to the job."""
    places = (("Service", "x-headless", "v1"), ("NetworkPolicy", JOB, "networking.k8s.io/v1"), ("StatefulSet", JOB, "apps/v1"))
    label = "app.kubernetes.io/name"
    for kind, name, version in places:
        job.jobs.patch(kind, name, {"metadata": {"labels": {label: "another"}}}, version)

    def is_right(kind: str, name: str, version: str) -> bool:
        return ((job.jobs.get(kind, name, version) or {})["metadata"]["labels"])[label] == "lockstep"

    job.until("labels are right again", lambda: all(is_right(*place) for place in places))
    run = next(name for name in job.uids("ConfigMap") if name.startswith(f"{JOB}-run-"))
    job.jobs.patch("ConfigMap", run, {"metadata": {"labels": {"lockstep.dev/job": None}}})  # it isn't seen by the watch any more
    job.until("the run is seen again", lambda: "lockstep.dev/job" in (job.jobs.get("ConfigMap", run) or {})["metadata"]["labels"])


def fail_and_retry(job: PlayedJob) -> None:
    """The last lines of the next end are others."""
    job.state = State.FAILED
    job.until("failed", lambda: is_failed(job) and f"{JOB}-log" in job.uids("ConfigMap"))
    job.jobs.patch("ConfigMap", f"{JOB}-log", {"data": {"node-0.log": "edited"}})
    job.state = State.RUNNING
    job.jobs.change(JOB, restart={"retry": 1})
    job.until("tried again", job.runs)


def names_taken(rig: Rig, namespace: str) -> None:
    """Objects of others, which the operator doesn't watch: it looks at them when it can't create its own."""
    with rig.job(namespace) as job:
        SCENARIOS["create"].act(job)
        job.until("running", job.runs)
        job.jobs.end(JOB)
        job.until("gone", lambda: is_gone(job))
        foreign: list[dict[str, Any]] = [
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x-headless"}, "spec": {"clusterIP": "None"}},
            {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": JOB}, "spec": {"podSelector": {}}},
        ]
        labels = {"foreign": JOB}
        template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
        spec = {"replicas": 0, "selector": {"matchLabels": labels}, "serviceName": "s", "template": template}
        stateful_set = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": JOB}, "spec": spec}
        for item in (*foreign, stateful_set):
            job.jobs.create(item)
        job.create()
        job.until("status says that names are taken", lambda: "NameTaken" in str(job.jobs.job(JOB)))
        for item in foreign:
            job.jobs.delete(item["kind"], item["metadata"]["name"], item["apiVersion"])
        job.until("status says that the StatefulSet's is", lambda: f"StatefulSet {JOB} in namespace" in str(job.jobs.job(JOB)))
        job.jobs.delete("StatefulSet", JOB, "apps/v1")
        job.jobs.end(JOB)
        job.until("gone again", lambda: is_gone(job))


def a_lost_node(rig: Rig, namespace: str) -> None:
    """The pod on it is replaced; the other one reports on."""
    core = client.CoreV1Api(rig.api.client)
    with rig.job(namespace) as job:
        running(job)
        job.jobs.change(JOB, restart={"lostNodeSeconds": 0})
        lost = next(pod for pod in job.jobs.pods(JOB) if pod["metadata"]["name"] == f"{JOB}-1")
        ready = {"type": "Ready", "reason": "Played", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        core.patch_node_status(lost["spec"]["nodeName"], {"status": {"conditions": [{**ready, "status": "Unknown"}]}})
        job.lost = 1
        job.until("the pod is replaced", lambda: job.uids("Pod").get(f"{JOB}-1") not in (None, lost["metadata"]["uid"]))
        core.patch_node_status(lost["spec"]["nodeName"], {"status": {"conditions": [{**ready, "status": "True"}]}})


def an_old_certificate(rig: Rig, home: str) -> None:
    """It is for other names: the operator renews it when it starts."""
    jobs = Jobs(rig.api, home)
    old = Certificates(**{field: jobs.secret(TLS_SECRET, key).decode() for field, key in FIELDS.items()})
    made = asdict(renew(old, ("elsewhere",), datetime.now(UTC)))
    data = {key: b64encode(made[field].encode()).decode() for field, key in FIELDS.items()}
    jobs.patch("Secret", TLS_SECRET, {"data": data})
    rig.operator.start()
    rig.until("a renewed certificate", lambda: jobs.secret(TLS_SECRET, "tls.crt").decode() != made["tls_cert"])


def a_deleted_lease(rig: Rig, home: str) -> None:
    """Whoever leads makes it again."""
    leases = client.CoordinationV1Api(rig.api.client)
    leases.delete_namespaced_lease(OPERATOR_NAME, home)

    def is_held() -> bool:
        try:
            return bool(leases.read_namespaced_lease(OPERATOR_NAME, home).spec.holder_identity)
        except client.ApiException as error:
            assert error.status == 404
            return False

    until("a lease that is held", is_held)


def ask_for_metrics(rig: Rig) -> None:
    """With a token that is good and opens nothing."""
    port = int(rig.settings["LOCKSTEP_METRICS_PORT"])
    if not port:
        return
    token = (
        client.CoreV1Api(rig.api.client)
        .create_namespaced_service_account_token(OPERATOR_NAME, OPERATOR_NAMESPACE, {"spec": {}})
        .status.token
    )
    context = ssl.create_default_context(cadata=rig.ca_pem)
    context.check_hostname = False
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
    assert connection.getresponse().status == 403
    connection.close()
