"""What plan/ renders, sent to a real API server: accepted as it is, and read back as it was meant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from kubernetes import client, config, watch

from golden.plan_cases import CASES, CONTEXT, HOSTILE, Case, expanded, job, pod_of, profile, trainer_of
from golden.plan_cases import cluster as profile_of
from golden.plan_strategies import jobs, profiles
from lockstep.api.cluster import TrainingCluster
from lockstep.api.files.yamltext import dump_yaml
from lockstep.api.job import TrainingJob
from lockstep.plan.diff import changes, needs_recreation
from lockstep.plan.render.objects import render
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults, Refused

PATHS = {
    "PersistentVolumeClaim": "/api/v1/namespaces/{}/persistentvolumeclaims",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Service": "/api/v1/namespaces/{}/services",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "StatefulSet": "/apis/apps/v1/namespaces/{}/statefulsets",
}


class DryRun:
    """Creates objects at the API server without keeping them; every field that it doesn't know is an error."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self.api = api
        self.namespace = namespace

    def create(self, item: dict[str, Any]) -> dict[str, Any]:
        """The object as the API server would store it. The body is YAML, as people would send it."""
        url = self.api.configuration.host + PATHS[item["kind"]].format(self.namespace) + "?dryRun=All&fieldValidation=Strict"
        headers = {"Content-Type": "application/yaml", "Accept": "application/json"}
        self.api.update_params_for_auth(headers, [], ["BearerToken"], url, "POST", None)
        body = dump_yaml(item | {"metadata": item["metadata"] | {"namespace": self.namespace}}).encode()
        response = self.api.call_api("POST", url, headers, body)
        stored: dict[str, Any] = json.loads(response.read())
        assert response.status == 201, stored.get("message")
        return stored


@pytest.fixture(scope="module")
def core(cluster: Path) -> Iterator[client.CoreV1Api]:
    with config.new_client_from_config(str(cluster)) as api:
        yield client.CoreV1Api(api)


@pytest.fixture(scope="module")
def server(core: client.CoreV1Api) -> Iterator[DryRun]:
    namespace = core.create_namespace({"metadata": {"generateName": "lockstep-render-"}}).metadata.name
    yield DryRun(core.api_client, namespace)
    core.delete_namespace(namespace)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden_objects_are_accepted_and_then_need_no_change(server: DryRun, case: Case) -> None:
    for item in case.objects():
        stored = server.create(item)
        desired = item | {"metadata": item["metadata"] | {"namespace": server.namespace}}
        assert changes(desired, stored) == [], item["kind"]
        assert not needs_recreation(desired, stored)


# No shrinking: it would send thousands of requests.
@settings(max_examples=30, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(some_job=jobs(), some_profile=profiles())
def test_whatever_is_valid_is_accepted(server: DryRun, some_job: TrainingJob, some_profile: TrainingCluster) -> None:
    try:
        resolved = resolve(some_job, some_profile, PlatformDefaults(image="trainer:1"))
    except Refused:
        assume(False)
    for item in render(resolved, CONTEXT):
        desired = item | {"metadata": item["metadata"] | {"namespace": server.namespace}}
        assert changes(desired, server.create(item)) == [], item["kind"]


def test_what_places_pods_is_accepted_as_it_is_written(server: DryRun) -> None:
    template = {"schedulerName": "volcano", "terminationGracePeriodSeconds": 600}
    for item in render(resolve(job(queueName="team-a", podTemplate=template), profile()), CONTEXT):
        stored = server.create(item)
        assert changes(item | {"metadata": item["metadata"] | {"namespace": server.namespace}}, stored) == [], item["kind"]
        assert stored["kind"] != "StatefulSet" or stored["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_comes_back_unchanged(server: DryRun, text: str) -> None:
    hostile = job(
        env=[{"name": "TEXT", "value": text}],
        podTemplate={"annotations": {"text": text}},
        script={"path": text or "x", "args": [text]},
    )
    stored = [server.create(item) for item in render(resolve(hostile, profile()), CONTEXT)]
    variables = {item["name"]: item.get("value", "") for item in trainer_of(stored)["env"]}
    assert expanded(variables["TEXT"], {"HOME": "wrong"}) == text
    (stateful_set,) = [item for item in stored if item["kind"] == "StatefulSet"]
    assert stateful_set["spec"]["template"]["metadata"]["annotations"]["text"] == text
    (config_map,) = [item for item in stored if item["kind"] == "ConfigMap"]
    assert json.loads(config_map["data"]["run.json"])["command"] == ["python3", text or "x", text]


def test_a_real_pod_sees_hostile_values_unchanged_under_pod_security_restricted(server: DryRun, core: client.CoreV1Api) -> None:
    texts = {f"TEXT_{index}": text for index, text in enumerate(HOSTILE)}
    env = [{"name": name, "value": text} for name, text in texts.items()]
    rendered = pod_of(render(resolve(job(env=env), profile_of("local")), CONTEXT))
    trainer = rendered["containers"][0]
    shown = "import json, os, sys; json.dump(dict(os.environ), sys.stdout)"
    container = {key: trainer[key] for key in ("name", "image", "env", "securityContext")} | {"command": ["python3", "-c", shown]}
    spec = {"containers": [container], "securityContext": rendered["securityContext"], "restartPolicy": "Never"}
    labels = {"apps.kubernetes.io/pod-index": "1"}
    core.patch_namespace(server.namespace, {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}})
    core.create_namespaced_pod(server.namespace, {"metadata": {"name": "env", "labels": labels}, "spec": spec})
    assert ended_phase(core, server.namespace, "env") == "Succeeded"
    seen = json.loads(core.read_namespaced_pod_log("env", server.namespace, _preload_content=False).data)
    assert {name: seen[name] for name in texts} == texts
    assert (seen["LOCKSTEP_NODE"], seen["NODE_RANK"]) == ("1", "1")


def ended_phase(core: client.CoreV1Api, namespace: str, pod: str) -> str:
    """How the pod ended, as soon as it did."""
    events = watch.Watch().stream(core.list_namespaced_pod, namespace, field_selector=f"metadata.name={pod}", timeout_seconds=60)
    for event in events:
        phase: str = event["object"].status.phase
        if phase in ("Succeeded", "Failed"):
            return phase
    return "still not ended"
