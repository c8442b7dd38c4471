"""compare: a job file against observed objects."""

from __future__ import annotations

import copy
from typing import Any

from golden.plan_cases import CONTEXT, job, profile
from lockstep.plan.ahead.live import Comparison, compare, next_start
from lockstep.plan.layers import Notice
from lockstep.plan.render.objects import RenderContext, render
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults, Resolved

UID = "6f1d0c4e-0000-4000-8000-000000000001"
LIVE = RenderContext(agent_image=CONTEXT.agent_image, key=CONTEXT.key, owner_uid=UID, report=CONTEXT.report)


def resolved(**spec: Any) -> Resolved:
    return resolve(job(**spec), profile())


def observed(conditions: list[dict[str, str]] | None = None, **spec: Any) -> list[dict[str, Any]]:
    """What a cluster has once the operator made a job of `spec`."""
    training_job = {"kind": "TrainingJob", "metadata": {"name": "x", "uid": UID}, "status": {"conditions": conditions or []}}
    return [training_job, *copy.deepcopy(render(resolve(job(**spec), profile(), PlatformDefaults(uid=UID)), LIVE))]


def differing(comparisons: list[Comparison]) -> dict[str, list[str]]:
    return {found.name.split("-run-")[0]: [change.path for change in found.changes] for found in comparisons if found.differs}


def test_a_job_that_is_there_as_its_file_says_does_not_differ() -> None:
    assert differing(compare(resolved(), observed())) == {}


def test_a_job_that_is_not_there_is_made_object_by_object() -> None:
    found = compare(resolved(), [])
    assert all(item.absent for item in found)
    assert [item.name.split("/")[0] for item in found] == [
        "PersistentVolumeClaim", "PersistentVolumeClaim", "ConfigMap", "NetworkPolicy", "Service", "StatefulSet",
    ]  # fmt: skip


def test_a_changed_setting_is_told_by_its_place_in_the_run() -> None:
    assert differing(compare(resolved(restart={"maxRestarts": 9}), observed())) == {"ConfigMap/x": ["run.restart.maxRestarts"]}


def test_a_setting_that_was_taken_away_is_told() -> None:
    assert differing(compare(resolved(), observed(podTemplate={"labels": {"team": "a"}}))) == {"ConfigMap/x": ["hash"]}


def test_suspending_changes_only_the_number_of_pods() -> None:
    assert differing(compare(resolved(suspend=True), observed())) == {"StatefulSet/x": ["spec.replicas"]}


def test_a_finished_job_is_expected_to_have_no_pods() -> None:
    over = observed([{"type": "Complete", "status": "True"}])
    assert differing(compare(resolved(), over)) == {"StatefulSet/x": ["spec.replicas"]}


def test_an_object_of_another_owner_is_foreign() -> None:
    seen = observed()
    for item in seen:
        if item["kind"] == "Service":
            item["metadata"]["ownerReferences"][0]["uid"] = "another"
    assert [found.name for found in compare(resolved(), seen) if found.foreign] == ["Service/x-headless"]


def test_a_claim_that_is_there_is_taken_as_it_is() -> None:
    seen = observed()
    for item in seen:
        if item["kind"] == "PersistentVolumeClaim":
            item["spec"]["resources"]["requests"]["storage"] = "1Gi"
    assert differing(compare(resolved(), seen)) == {}


def test_a_node_that_preflight_ruled_out_is_no_difference() -> None:
    ruled_out = PlatformDefaults(uid=UID, excluded_nodes=("node-b",))
    status = {"excludedNodes": [{"name": "node-b"}]}
    training_job = {"kind": "TrainingJob", "metadata": {"name": "x", "uid": UID}, "status": status}
    assert differing(compare(resolved(), [training_job, *render(resolve(job(), profile(), ruled_out), LIVE)])) == {}


def stored(**spec: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """A job and its frozen run, as a cluster has them once the operator has started it."""
    given = job(**spec)
    run = render(resolve(given, profile(), PlatformDefaults(uid=UID)), LIVE)[3]
    assert run["kind"] == "ConfigMap"
    status = {"run": {"name": run["metadata"]["name"]}}
    metadata = {"name": "x", "namespace": run["metadata"]["namespace"], "uid": UID}
    item = {"apiVersion": given.api_version, "kind": "TrainingJob", "metadata": metadata, "spec": given.spec.to_dict(), "status": status}
    return item, {f"{metadata['namespace']}/{run['metadata']['name']}": run}


def next_paths(item: dict[str, Any], runs: dict[str, dict[str, Any]], image: str = LIVE.agent_image, **cluster: Any) -> list[str]:
    present = {"metadata": {"name": "c", "annotations": {"lockstep.dev/is-default-cluster": "true"}}, "spec": profile().spec.to_dict()}
    start = next_start(item, [{**present, "spec": present["spec"] | cluster}], runs, image)
    return [start.message] if isinstance(start, Notice) else [change.path for change in start]


def test_the_next_start_of_a_stored_job_differs_by_the_operator_s_image_and_the_cluster_alone() -> None:
    assert next_paths(*stored()) == []
    image = "template.pod.spec.initContainers[0].image"
    assert next_paths(*stored(), image="r.example.com/lockstep-operator:2")[0] == image
    assert next_paths(*stored(), security={"serviceAccount": "other"}) == ["template.pod.spec.serviceAccountName"]


def test_a_stored_job_that_would_not_be_accepted_is_told_with_the_reason() -> None:
    item, runs = stored()
    item["spec"]["nodes"] = -1
    (message,) = next_paths(item, runs)
    assert message.startswith("the job can't be used: spec.nodes: ")


def test_a_run_that_the_operator_did_not_write_is_no_run_to_compare_with() -> None:
    item, runs = stored()
    (run,) = runs.values()
    run["data"]["run.json"] = "{}"
    assert next_paths(item, runs, image="other") == []
