"""Tests of which SCC admits which of Lockstep's pods, by OpenShift's own API server, and of the message where none does.

A dry run of a pod, as the controller or the person that would create it: nothing starts, and every kind of pod takes a second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
import yaml
from kubernetes import client, config, dynamic
from kubernetes.client.exceptions import ApiException

from golden.plan_cases import CONTEXT, job, of_kind
from golden.plan_cases import cluster as shipped
from lockstep.api.cluster import TrainingCluster
from lockstep.api.sccs import RDMA_SCC
from lockstep.devcluster.host.layout import default_layout
from lockstep.devcluster.python_volume import publish_code
from lockstep.plan.discovery.probe import probe_pods
from lockstep.plan.render.objects import render
from lockstep.plan.render.readerpod import reader_pod
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults
from lockstep.plan.waiting.notcreated import explained
from lockstep.platforms.clusters.install import operator_objects
from lockstep.platforms.jobs.keeper import keeper
from lockstep.platforms.kubernetes import objects as in_namespace
from lockstep.platforms.kubernetes.shortruns import prepared, prepared_to_measure
from support.checkout import ROOT
from support.cluster_facts import rdma_cluster
from support.clusters.cluster_jobs import API, SERVICE_ACCOUNT, Jobs, kubeconfig_of, prepare, until
from support.in_process import lockstep

pytestmark = pytest.mark.long
Typed = Callable[..., subprocess.CompletedProcess[str]]
Pod = dict[str, Any]
PAGE = ROOT / "docs" / "reference" / "rights.md"
GRANTS = ("nothing more", "nonroot-v2", "anyuid", "privileged", RDMA_SCC)
"""SCCs that the jobs' service account was given; restricted-v2 and restricted-v3 every account has."""
CONTROLLERS = {kind: f"system:serviceaccount:kube-system:{kind.lower()}-controller" for kind in ("StatefulSet", "ReplicaSet", "Job")}
ADMIN, OWNER = "administrator", "rita"
REFUSED = "refused"
UID_RANGE = "openshift.io/sa.scc.uid-range"
ADMITS_NONE = "no SCC that the pod's service account may use admits it"
NOT_YOURS = "you may not run programs in pods that neither you nor their service account may create: locks-"


@dataclass(frozen=True)
class Kind:
    """Pods of one row of the page's table, and the accounts that create them."""

    pods: tuple[Pod, ...]
    makers: tuple[str, ...]


def with_memlock_unlimited(profile: TrainingCluster) -> TrainingCluster:
    spec = profile.spec.to_dict()
    spec["network"]["rdma"]["memlock"] = "Unlimited"
    spec["security"]["ipcLock"] = False
    return TrainingCluster.model_validate({"metadata": {"name": "unlimited"}, "spec": spec})


def of_platform(profile: TrainingCluster, platform: str) -> TrainingCluster:
    return TrainingCluster.model_validate({"metadata": {"name": "other"}, "spec": profile.spec.to_dict() | {"platform": platform}})


def stateful_set(objects: list[Pod]) -> Pod:
    (found,) = of_kind(objects, "StatefulSet")
    return found


def pod_of(owner: Pod) -> Pod:
    """The pod that a controller makes of its owner's template."""
    template = json.loads(json.dumps(owner["spec"]["template"]))
    return {"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"] | {"generateName": "x-"}, "spec": template["spec"]}


def of_ranks(profile: TrainingCluster, mode: str, namespace: str) -> Kind:
    """Pods of a job, a dev environment, a run without an operator, preflight and a sweep."""
    given: dict[str, Any] = {"fabric": {"mode": mode}, "storage": {"mode": "Shared"}}  # else only the controller knows the pods' claims
    batch, dev = job(**given), job(type="Interactive", **given)
    rendered = [render(resolve(one, profile, PlatformDefaults(namespace=namespace)), CONTEXT) for one in (batch, dev)]
    runs = [make(batch, profile, namespace) for make in (in_namespace.prepare, prepared, prepared_to_measure)]
    sets = [stateful_set(objects) for objects in [*rendered, *map(in_namespace.objects, runs)]]
    return Kind(tuple(map(pod_of, sets)), (CONTROLLERS["StatefulSet"],))


def kinds(namespace: str) -> dict[str, Kind]:
    """Every kind of pod that Lockstep makes, as the page names it."""
    profile = shipped("barcelona")
    started = stateful_set(render(resolve(job(fabric={"mode": "RDMA"}), profile, PlatformDefaults(namespace=namespace)), CONTEXT))
    started["metadata"] |= {"namespace": namespace, "uid": "0-0"}
    (keeps,) = of_kind(keeper(started, {"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "0-0"}), "Job")
    (operates,) = of_kind(operator_objects(profile, "operator:1", namespace=namespace, manifests=ROOT / "manifests"), "Deployment")
    return {
        "over TCP": of_ranks(profile, "TCP", namespace),
        "over RDMA with `memlock: unlimited`": of_ranks(with_memlock_unlimited(profile), "RDMA", namespace),
        "over RDMA with `ipc_lock: true`": of_ranks(profile, "RDMA", namespace),
        "readers": Kind((reader_pod(started, 0, "x", 60),), (ADMIN, OWNER)),
        "probes": Kind((next(iter(probe_pods(rdma_cluster(), "x", "image:1"))),), (ADMIN, OWNER)),
        "keepers": Kind((pod_of(keeps),), (CONTROLLERS["Job"],)),
        "the operator": Kind((pod_of(operates),), (CONTROLLERS["ReplicaSet"],)),
    }


@dataclass(frozen=True)
class Server:
    """The API server, asked as several people; `places`: a namespace for each grant."""

    people: Mapping[str, client.CoreV1Api]
    places: Mapping[str, str]

    def answer(self, grant: str, pod: Pod, maker: str) -> str:
        """Return the SCC that admits the pod, or the refusal."""
        body = {**pod, "metadata": {key: value for key, value in pod["metadata"].items() if key not in ("ownerReferences", "namespace")}}
        try:
            made = self.people[maker].create_namespaced_pod(self.places[grant], body, dry_run="All")
        except ApiException as error:
            return str(json.loads(error.body)["message"])
        return str(made.metadata.annotations["openshift.io/scc"])


@pytest.fixture(scope="module")
def server(cluster: Path, api: dynamic.DynamicClient, operator: None) -> Iterator[Server]:
    """A namespace for each grant, with the accounts of Lockstep's pods, and `rita` as its admin. Lockstep is deployed, with its SCC."""
    core, rbac = client.CoreV1Api(api.client), client.RbacAuthorizationV1Api(api.client)
    with ExitStack() as stack:
        people = {ADMIN: core}
        for person in (OWNER, *CONTROLLERS.values()):
            connection = stack.enter_context(config.new_client_from_config(str(cluster)))
            connection.set_default_header("Impersonate-User", person)
            people[person] = client.CoreV1Api(connection)
        places = {}
        for grant in GRANTS:
            name = core.create_namespace({"metadata": {"generateName": "lockstep-test-"}}).metadata.name
            stack.callback(core.delete_namespace, name)
            places[grant] = name
            for account in (SERVICE_ACCOUNT, "x-keeper", "lockstep-operator"):
                core.create_namespaced_service_account(name, {"metadata": {"name": account}})
            bind(rbac, name, "admin", {"kind": "User", "name": OWNER})
            if grant != GRANTS[0]:
                role = grant if grant == RDMA_SCC else f"system:openshift:scc:{grant}"
                bind(rbac, name, role, {"kind": "ServiceAccount", "name": SERVICE_ACCOUNT, "namespace": name})
        yield Server(people, places)


def bind(rbac: client.RbacAuthorizationV1Api, namespace: str, role: str, subject: dict[str, str]) -> None:
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
    rbac.create_namespaced_role_binding(namespace, {"metadata": {"generateName": "x-"}, "roleRef": reference, "subjects": [subject]})


def table() -> dict[str, list[str]]:
    """Row of each kind in the page's table: the SCC for each grant."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    start = next(number for number, line in enumerate(lines) if all(grant in line for grant in GRANTS))
    rows = {}
    for line in lines[start + 2 :]:
        first, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != len(GRANTS):
            break
        rows |= {row: [cell.strip("`") for cell in cells] for row in first.split(", ")}
    return rows


def test_every_pod_is_admitted_by_the_scc_that_the_page_names(server: Server) -> None:
    def answers(grant: str, kind: Kind) -> str:
        """One answer for all pods of the row and all who make them, or the different ones."""
        given = {server.answer(grant, pod, maker) for pod in kind.pods for maker in kind.makers}
        return " | ".join(sorted({REFUSED if " is forbidden: " in answer else answer for answer in given}))

    by_grant = {grant: kinds(place) for grant, place in server.places.items()}
    seen = {row: [answers(grant, by_grant[grant][row]) for grant in GRANTS] for row in by_grant[GRANTS[0]]}
    assert seen == table()


def test_restricted_v3_admits_none_of_them_and_says_why(server: Server) -> None:
    """It wants a user namespace, where CAP_IPC_LOCK locks nothing, and a shared volume would have to map ids."""
    place = server.places[GRANTS[0]]
    for row, kind in kinds(place).items():
        for pod in kind.pods:
            asks = {**pod, "metadata": {**pod["metadata"], "annotations": {"openshift.io/required-scc": "restricted-v3"}}}
            refusal = server.answer(GRANTS[0], asks, kind.makers[0])
            assert "restricted-v3 says .spec.hostUsers: Invalid value: null: Host Users must be set to false" in explained(
                refusal, place
            ), row


def test_a_refusal_quotes_the_nearest_scc_whole_and_says_what_an_administrator_types(server: Server) -> None:
    place = server.places[GRANTS[0]]
    kind = kinds(place)["over RDMA with `ipc_lock: true`"]
    start, size = map(int, server.people[ADMIN].read_namespace(place).metadata.annotations[UID_RANGE].split("/"))
    for pod in kind.pods:
        what, _, remedy = explained(server.answer(GRANTS[0], pod, kind.makers[0]), place, SERVICE_ACCOUNT).partition(": RDMA pods need ")
        user = f".containers[0].runAsUser: Invalid value: 0: must be in the ranges: [{start}, {start + size - 1}]"
        assert f"{ADMITS_NONE}: restricted-v2 says " in what and user in what
        assert what.endswith('.containers[0].capabilities.add: Invalid value: "IPC_LOCK": capability may not be added')
        assert remedy == f"the SCC {RDMA_SCC}: an administrator types: {giving(place)}"


def giving(namespace: str) -> str:
    return f"oc adm policy add-scc-to-user {RDMA_SCC} -z {SERVICE_ACCOUNT} -n {namespace}"


def test_a_file_of_plain_kubernetes_is_told_which_key_is_wrong(server: Server) -> None:
    place = server.places[GRANTS[0]]
    for mode in ("TCP", "RDMA"):
        for pod in of_ranks(of_platform(shipped("barcelona"), "Kubernetes"), mode, place).pods:
            sentence = explained(server.answer(GRANTS[0], pod, CONTROLLERS["StatefulSet"]), place)
            assert "1000 is not an allowed group" in sentence and "write platform: openshift into the cluster file" in sentence


@dataclass(frozen=True)
class Run:
    """A run over RDMA without an operator, of the admin of a project, and the words that lead to it."""

    jobs: Jobs
    kubeconfig: Path
    said: IO[str]
    where: tuple[str, ...]


@pytest.fixture(scope="module")
def rdma_file(cluster_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    described = yaml.safe_load(cluster_file.read_text())
    described["cluster"]["name"] = "rdma"
    described["network"]["rdma"] = {"enabled": True}
    described["security"]["ipc_lock"] = True
    path = tmp_path_factory.mktemp("clusters") / "rdma.yaml"
    path.write_text(yaml.safe_dump(described))
    return path


@pytest.fixture(scope="module")
def run(
    api: dynamic.DynamicClient, cluster: Path, operator: None, rdma_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("rita")
    core = client.CoreV1Api(api.client)
    namespace = core.create_namespace({"metadata": {"generateName": "lockstep-test-"}}).metadata.name
    jobs = prepare(api, namespace)
    kubeconfig = kubeconfig_of("admin", jobs, cluster, folder)
    volume = {"name": "scripts", "mountPath": "/scripts", "configMap": {"name": "scripts"}}
    spec = {
        "nodes": 2,
        "script": {"path": "/scripts/wait.py"},
        "fabric": {"mode": "RDMA"},
        "preflight": "None",
        "podTemplate": {"volumes": [volume]},
    }
    (folder / "job.yaml").write_text(
        yaml.safe_dump({"apiVersion": API, "kind": "TrainingJob", "metadata": {"name": "locks"}, "spec": spec})
    )
    where = ("-n", namespace, "--cluster", str(rdma_file))
    typed = [sys.executable, "-m", "lockstep.cli.main", "run", "-f", str(folder / "job.yaml"), "--in-namespace", *where]
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
    with (folder / "said").open("w+") as said:
        process = subprocess.Popen(typed, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT)
        try:
            yield Run(jobs, kubeconfig, said, where)
        finally:
            process.kill()
            process.wait()
            core.delete_namespace(namespace)


def test_who_lacks_the_scc_is_told_how_to_get_it_and_the_run_starts_once_it_is_there(run: Run, oc: Typed) -> None:
    def told() -> str:
        run.said.seek(0)
        return run.said.read()

    command = giving(run.jobs.namespace)
    until("the refusal", lambda: f"an administrator types: {command}" in told())
    assert f"{ADMITS_NONE}: restricted-v2 says .containers[0].runAsUser: Invalid value: 0" in told()
    assert oc(*command.split()[1:]).returncode == 0
    until("both pods run", lambda: "attempt 1 starts" in told())
    for pod in run.jobs.pods("locks"):
        assert pod["metadata"]["annotations"]["openshift.io/scc"] == RDMA_SCC


@pytest.mark.parametrize(
    "typed",
    [["shell", "locks"], ["cp", "locks:/workspace/x", "."], ["sync", "locks", "."], ["vscode", "locks"], ["stacks", "locks"]],
    ids=lambda typed: typed[0],
)
def test_who_may_no_longer_create_such_pods_is_told_so_by_each_verb(
    run: Run, oc: Typed, typed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sent.py").touch()

    def told() -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KUBECONFIG", str(run.kubeconfig))
            done = lockstep(*typed, *run.where)
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    give = giving(run.jobs.namespace)
    assert oc(*give.replace("add-scc-to-user", "remove-scc-from-user").split()[1:]).returncode == 0
    try:
        refused = until("the refusal", lambda: NOT_YOURS in told() and told(), 20)
        assert give.replace(SERVICE_ACCOUNT, "SERVICE_ACCOUNT") in refused
        run_true = ("exec", "locks-0", "-n", run.jobs.namespace, "--kubeconfig")
        assert oc(*run_true, os.environ["KUBECONFIG"], "--", "true").returncode == 0, "an administrator may use an SCC that admits the pod"
        assert "exceeds your permissions" in oc(*run_true, str(run.kubeconfig), "--", "true").stderr
    finally:
        given = oc(*give.split()[1:])
    assert given.returncode == 0, given.stderr
    until("the right", lambda: NOT_YOURS not in told(), 20)


def test_an_operator_of_one_project_runs_under_restricted_v2_and_its_jobs_say_what_rdma_needs(
    api: dynamic.DynamicClient,
    cluster: Path,
    operator: None,
    rdma_file: Path,
    oc: Typed,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = prepare(api, namespace)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig_of("admin", jobs, cluster, tmp_path)))
    own = tmp_path / "own.yaml"
    described = yaml.safe_load(rdma_file.read_text())
    described["cluster"]["namespace"] = namespace
    own.write_text(yaml.safe_dump(described))
    publish_code(default_layout().python_volume)
    done = lockstep("deploy", str(own), "--namespace-only", "--no-dev")
    assert done.returncode == 1 and "operator     ready" in done.stdout and f"RoleBinding {namespace}/{RDMA_SCC}: missing" in done.stdout
    pods = jobs.kind("Pod").get(namespace=namespace, label_selector="app.kubernetes.io/component=operator").to_dict()["items"]
    assert {pod["metadata"]["annotations"]["openshift.io/scc"] for pod in pods} == {"restricted-v2"}
    jobs.start("locks", cluster="rdma", fabric={"mode": "RDMA"}, preflight="None")
    said = f"{ADMITS_NONE}: restricted-v2 says "
    message = jobs.until_condition("locks", "PodsScheduled", "False", "PodsRefused")["message"]
    assert said in message and message.endswith(f"an administrator types: {giving(namespace)}")
    monkeypatch.setenv("KUBECONFIG", str(cluster))
    assert oc(*giving(namespace).split()[1:]).returncode == 0
    jobs.until_running("locks")
