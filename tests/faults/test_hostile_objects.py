"""Objects that anybody with the role `edit` can make: too deep, too large, too many. A real API server has them, and the operator serves
the other jobs.

The process's memory is limited, too: its pod has 1 GiB, and an operator that is killed for memory at each list never leads.
"""

from __future__ import annotations

import http.client
import json
import random
import ssl
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from lockstep.api.names import job_labels
from lockstep.api.objects import DEPTH_MAX
from lockstep_machine.network import free_ports
from support.clusters.cluster_jobs import Jobs, prepare
from support.clusters.control_plane import Plane, control_plane
from support.clusters.operator_faults import Rig, rig_in
from support.clusters.played_job import PlayedJob

MEMORY_MAX_BYTES = 256 << 20
LARGE = 1_000_000
_rng = random.Random(12)  # noqa: S311 (no secret)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """In a control plane of its own: what these objects leave there, if a test fails, is in no other test's way."""
    folder, plane = tmp_path_factory.mktemp("hostile"), tmp_path_factory.mktemp("plane")
    with (
        control_plane(plane, list) as kubeconfig,
        rig_in(folder, Plane(kubeconfig), LOCKSTEP_METRICS_PORT=str(free_ports(1)[0])) as rig,
    ):
        yield rig


NOISE = tuple(map(chr, range(0x20000, 0x2A6D0)))
"""Of four bytes each: what the API limits by characters has four times as many bytes."""


def noise(characters: int) -> str:
    """Text that no compression makes small."""
    return "".join(_rng.choices(NOISE, k=characters))


def training_job(name: str, **spec: Any) -> dict[str, Any]:
    metadata = {"name": name, "labels": {"team": "hostile"}}
    return {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": {"nodes": 1, **spec}}


def deep_job(name: str, levels: int, shape: tuple[str, str] = ('{"a":', "}")) -> str:
    training = {"model": {"name": "/workspace/model"}, "data": {"path": "/datasets/x.jsonl"}, "deepspeed": {"z": "DEEP"}}
    text = json.dumps(training_job(name, training=training))
    return text.replace('"DEEP"', shape[0] * levels + "1" + shape[1] * levels)


def trained(name: str, deepspeed: Any, **spec: Any) -> dict[str, Any]:
    return training_job(
        name, training={"model": {"name": "/workspace/model"}, "data": {"path": "/datasets/x.jsonl"}, "deepspeed": deepspeed}, **spec
    )


def large_job(name: str) -> str:
    """A megabyte in the one field whose size its CRD can't bound."""
    return json.dumps(trained(name, {"z": noise(LARGE // 4)}, suspend=True))


def dense_job(name: str) -> str:
    """Whose text is small beside what it takes as Python objects."""
    training = {"model": {"name": "/workspace/model"}, "data": {"path": "/datasets/x.jsonl"}, "deepspeed": {"z": "DENSE"}}
    return json.dumps(training_job(name, training=training)).replace('"DENSE"', "[" + ",".join(["{}"] * (LARGE // 3)) + "]")


def labeled(kind: str, name: str, **content: Any) -> str:
    version = {"ConfigMap": "v1", "Service": "v1", "Pod": "v1"}[kind]
    return json.dumps({"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": job_labels("x")}, **content})


def event(name: str, namespace: str) -> str:
    about = {"kind": "StatefulSet", "name": "x", "namespace": namespace, "uid": "u"}
    body = {
        "apiVersion": "v1", "kind": "Event", "metadata": {"name": name}, "involvedObject": about, "type": "Warning",
        "reason": "FailedCreate",
    }  # fmt: skip
    return json.dumps({**body, "message": noise(LARGE // 4)})


PATHS = {
    "TrainingJob": "/apis/lockstep.dev/v1alpha1/namespaces/{}/trainingjobs", "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Event": "/api/v1/namespaces/{}/events", "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
}  # fmt: skip


def send(api: client.ApiClient, path: str, text: str) -> None:
    """As text: the client's own JSON is not for such depths."""
    url, headers = api.configuration.host + path, {"Content-Type": "application/json", "Accept": "application/json"}
    api.update_params_for_auth(headers, [], ["BearerToken"], url, "POST", None)
    api.rest_client.pool_manager.connection_pool_kw["maxsize"] = 8
    reply = api.rest_client.pool_manager.request("POST", url, body=text.encode(), headers=headers)
    assert reply.status == 201, reply.data[:500]


def make(rig: Rig, namespace: str, kind: str, texts: Iterator[str]) -> None:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda text: send(rig.api.client, PATHS[kind].format(namespace), text), texts))


def peak_bytes(rig: Rig) -> int:
    """Of the operator's process, all that it ever had in memory."""
    text = Path(f"/proc/{rig.operator.pid}/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmHWM:"))) << 10


def served(job: PlayedJob) -> None:
    job.fail_and_start_again()
    job.until("another job is served", job.runs)


@pytest.fixture
def hostile(rig: Rig) -> Iterator[Jobs]:
    core = client.CoreV1Api(rig.api.client)
    namespace = core.create_namespace({"metadata": {"generateName": "lockstep-hostile-"}}).metadata.name
    yield prepare(rig.api, namespace)
    core.delete_namespace(namespace)


def survives(rig: Rig, make_them: Callable[[], None]) -> int:
    """Make them beside a job that runs: it is served by the operator that watches, and by the next one, which lists. The memory of both at
    most.
    """
    with rig.job() as job:
        job.create()
        job.until("running", job.runs)
        before, peaks = len(rig.operator.ends), []
        make_them()
        served(job)
        peaks.append(peak_bytes(rig))
        rig.operator.start()
        served(job)
        job.fail_and_start_again()
        job.until("served after a while, too", job.runs)
        peaks.append(peak_bytes(rig))
        ends = [line for line in rig.operator.ends[before:] if "doesn't hold the lease" not in line]  # (a busy machine ends that)
        assert ends == [], "the operator ended by itself"
    print(f"peak memory {max(peaks) / 2**20:.0f} MiB")
    return max(peaks)


def test_a_job_of_any_depth_says_so_of_itself_and_all_others_are_served(rig: Rig, hostile: Jobs) -> None:
    depths = {"deep-90": 90, "deep-900": 900, "deep-1500": 1500, "deep-4500": 4500}
    texts = [deep_job(name, levels) for name, levels in depths.items()] + [deep_job("lists-3000", 3000, ("[", "]"))]
    survives(rig, lambda: make(rig, hostile.namespace, "TrainingJob", iter(texts)))
    with rig.job() as job:
        for name in (*depths, "lists-3000"):
            told = job.until(f"{name} says so", lambda name=name: accepted(rig, hostile.namespace, name))
            assert f"nested deeper than {DEPTH_MAX} levels" in told


def accepted(rig: Rig, namespace: str, name: str) -> str:
    """The message of condition Accepted, where that is False; by a table, since Python can't read the object."""
    api = rig.api.client
    url = f"{api.configuration.host}{PATHS['TrainingJob'].format(namespace)}/{name}/status"
    headers: dict[str, str] = {}
    api.update_params_for_auth(headers, [], ["BearerToken"], url, "GET", None)
    text = api.rest_client.pool_manager.request("GET", url, headers=headers).data.decode()
    _, found, rest = text.partition('"message":"the job can\'t be used: ')
    return rest.partition('"')[0] if found else ""


def variables(text: str, count: int) -> list[dict[str, str]]:
    return [{"name": f"V{number}", "value": text} for number in range(count)]


LARGEST: dict[str, dict[str, Any]] = {
    "env": training_job("env", script={"path": "/x.py"}, env=variables("\U0001f980" * 2048, 32)),
    "html": training_job("html", script={"path": "/x.py"}, env=variables("<" * 5400, 16)),
    "control": training_job("control", script={"path": "/x.py"}, env=variables("\x01" * 3500, 16)),
    "args": training_job("args", script={"path": "/x.py", "args": ["\U0001f980" * 1024] * 32}),
    "annotations": training_job(
        "annotations", script={"path": "/x.py"}, podTemplate={"annotations": {f"n{i:02}": "\U0001f980" * 4096 for i in range(15)}}
    ),
    "variables": training_job(
        "variables",
        training={
            "model": {"name": "/workspace/model"},
            "data": {"path": "/datasets/x.jsonl", "chatTemplateKwargs": {"z": "x" * 65_000}},
        },
    ),
}
"""As large as each bound lets a job be: the API server takes its objects."""
TOO_LARGE: dict[str, tuple[dict[str, Any], str, str]] = {
    "html-all": (training_job("html-all", script={"path": "/x.py"}, env=variables("<" * 8192, 26)), "RunTooLarge",
        "at most 1000000 are allowed"),
    "control-args": (training_job("control-args", script={"path": "/x.py", "args": ["\x01" * 4096] * 32}, env=variables("\x01" * 8192, 10)),
        "InvalidSpec", "at most 393216 can be read"),
    "settings": (trained("settings", {"z": "x" * 66_000}), "InvalidSpec", "at most 65536 are allowed"),
    "levels": (json.loads(deep_job("levels", 40)), "InvalidSpec", "nested deeper than 32 levels"),
    "all": (
        training_job("all", script={"path": "/x.py", "args": ["x" * 4096] * 32}, env=variables("x" * 8192, 32)), "InvalidSpec",
            "at most 393216 can be read"
    ),
}  # fmt: skip
"""What the API server takes and no pod can have, or nobody should have to read: the reason and the number that condition Accepted gives."""


def test_the_largest_job_of_each_bound_gets_its_pods_and_what_is_larger_says_why_not(rig: Rig, hostile: Jobs) -> None:
    core, apps = client.CoreV1Api(rig.api.client), client.AppsV1Api(rig.api.client)
    for body in (*LARGEST.values(), *(body for body, _, _ in TOO_LARGE.values())):
        send(rig.api.client, PATHS["TrainingJob"].format(hostile.namespace), json.dumps(body, ensure_ascii=False))
    for name in LARGEST:
        rig.until(f"pods of {name}", lambda name=name: exists(lambda: core.read_namespaced_pod(f"{name}-0", hostile.namespace)))
    for name, (_, reason, number) in TOO_LARGE.items():
        rig.until(f"{name} says so", lambda name=name: hostile.condition(name, "Accepted"))
        accepted = hostile.condition(name, "Accepted")
        assert (accepted["status"], accepted["reason"]) == ("False", reason) and number in accepted["message"], accepted
        assert not exists(lambda name=name: apps.read_namespaced_stateful_set(name, hostile.namespace))


def exists(read: Callable[[], Any]) -> bool:
    try:
        read()
    except client.ApiException as error:
        if error.status == 404:
            return False
        raise
    return True


def test_a_job_that_leaves_its_status_no_room_says_so_by_an_event_and_all_others_are_served(rig: Rig, hostile: Jobs) -> None:
    """etcd takes 1.5 MiB of one object, and the API server passes its refusal on as 500."""
    fits = next(size for size in range(1_572_800, 1_560_000, -100) if takes(rig, hostile.namespace, size))
    assert fits > 1_561_000
    core = client.CoreV1Api(rig.api.client)

    def told() -> list[str]:
        events = core.list_namespaced_event(hostile.namespace, field_selector="reason=StatusRefused").items
        return [event.message for event in events if event.involved_object.name == f"full-{fits}"]

    rig.until("an event says so", told)
    assert "request is too large: the job leaves no room" in told()[0]
    before = writes(rig, hostile.namespace)
    with rig.job() as job:
        job.create()
        job.until("running", job.runs)
        served(job)
        served(job)
    assert writes(rig, hostile.namespace) - before < 3 * 8, "the operator asks ever less often, and each time for less, too"


def takes(rig: Rig, namespace: str, size: int) -> bool:
    try:
        send(rig.api.client, PATHS["TrainingJob"].format(namespace), json.dumps(trained(f"full-{size}", {"z": "x" * size})))
    except AssertionError:
        return False
    return True


def writes(rig: Rig, namespace: str) -> int:
    """Of the job's status."""
    path = PATHS["TrainingJob"].format(namespace)
    return sum(method == "PATCH" and seen.startswith(path) for method, seen in rig.proxy.requests)


def test_large_jobs_configmaps_and_events_take_little_memory(rig: Rig, hostile: Jobs) -> None:
    assert survives(rig, lambda: fill(rig, hostile.namespace, jobs=20, config_maps=30)) < MEMORY_MAX_BYTES


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_hundreds_of_them_take_little_memory_too(rig: Rig, hostile: Jobs) -> None:
    assert survives(rig, lambda: fill(rig, hostile.namespace, jobs=200, config_maps=300)) < MEMORY_MAX_BYTES


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_thousands_of_jobs_with_names_that_people_make_up_leave_no_memory_and_no_series(rig: Rig, hostile: Jobs) -> None:
    """Each names another cluster, is seen by the operator and is deleted again."""
    make_and_delete(rig, hostile, 1000, "first")
    before, (series, _) = memory_bytes(rig), scrape(rig)
    began = time.monotonic()
    make_and_delete(rig, hostile, 5000, "more")
    took = time.monotonic() - began
    growth = memory_bytes(rig) - before
    print(f"5,000 jobs in {took:.0f} s: {growth / 2**20:+.1f} MiB from {before / 2**20:.0f} MiB")
    left, seconds = scrape(rig, times=5)
    print(f"{series} to {left} series, a scrape takes {seconds * 1000:.0f} ms")
    assert growth <= 5 << 20
    assert left <= series + 10 and seconds <= 0.1


def make_and_delete(rig: Rig, jobs: Jobs, count: int, prefix: str, at_once: int = 250) -> None:
    for begin in range(0, count, at_once):
        names = [f"{prefix}-{number}" for number in range(begin, begin + at_once)]
        make(rig, jobs.namespace, "TrainingJob", (json.dumps(unprofiled(name)) for name in names))
        for name in names[-8:]:
            rig.until(f"the operator has seen {name}", lambda name=name: jobs.condition(name, "Accepted"))
        client.CustomObjectsApi(rig.api.client).delete_collection_namespaced_custom_object(
            "lockstep.dev", "v1alpha1", jobs.namespace, "trainingjobs"
        )


def unprofiled(name: str) -> dict[str, Any]:
    return training_job(name, script={"path": "/x.py"}, cluster=f"cluster-of-{name}")


def memory_bytes(rig: Rig) -> int:
    """Of the operator's process, what it shares with the one that it was forked from included: PSS would grow with every shared page that
    it touches.
    """
    text = Path(f"/proc/{rig.operator.pid}/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmRSS:"))) << 10


def scrape(rig: Rig, times: int = 1) -> tuple[int, float]:
    """Series of GET /metrics as Prometheus reads it, and the seconds that it takes with its handshake, the median of so many."""
    context = ssl.create_default_context(cadata=rig.ca_pem)
    context.check_hostname = False
    connection = http.client.HTTPSConnection("127.0.0.1", int(rig.settings["LOCKSTEP_METRICS_PORT"]), context=context)
    token = reader_token(rig)
    seconds, lines = [], list[str]()

    def reads() -> bool:
        time.sleep(0.5)  # the port takes four connections a second of one address
        began = time.monotonic()
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
        reply = connection.getresponse()
        lines[:] = reply.read().decode().splitlines()
        seconds.append(time.monotonic() - began)
        return reply.status == 200

    try:
        rig.until("the token may read metrics", reads)  # which the API server is asked once
        seconds.clear()
        assert all(reads() for _ in range(times))
    finally:
        connection.close()
    return sum(not line.startswith("#") for line in lines), statistics.median(seconds)


def reader_token(rig: Rig) -> str:
    """Of an account that may get /metrics."""
    name, account = "lockstep-metrics-test", "lockstep-operator"
    access = client.RbacAuthorizationV1Api(rig.api.client)
    binding = {"metadata": {"name": name}, "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}}
    if not exists(lambda: access.read_cluster_role(name)):
        access.create_cluster_role({"metadata": {"name": name}, "rules": [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]})
        access.create_cluster_role_binding(
            {**binding, "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": "lockstep-system"}]}
        )
    made = client.CoreV1Api(rig.api.client).create_namespaced_service_account_token(account, "lockstep-system", {"spec": {}})
    return str(made.status.token)


def fill(rig: Rig, namespace: str, jobs: int, config_maps: int) -> None:
    make(rig, namespace, "TrainingJob", (large_job(f"large-{number}") for number in range(jobs)))
    make(rig, namespace, "TrainingJob", (dense_job(f"dense-{number}") for number in range(jobs // 10)))
    text = noise(LARGE // 4)
    make(rig, namespace, "ConfigMap", (labeled("ConfigMap", f"large-{number}", data={"a": text}) for number in range(config_maps)))
    make(rig, namespace, "Event", (event(f"large-{number}", namespace) for number in range(config_maps // 3)))
