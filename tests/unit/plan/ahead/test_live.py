"""compare: a job file against observed objects."""

from __future__ import annotations

import copy
from typing import Any

from golden.plan_cases import CONTEXT, job, profile
from lockstep.plan.ahead.live import Comparison, compare
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
