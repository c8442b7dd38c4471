"""Frozen starts: what is frozen, when its hash changes, and that a running gang depends on nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from golden.plan_cases import CONTEXT, TRAINING, cluster, job, of_kind, profile
from lockstep.plan.render.objects import PLAIN, RenderContext, children, claims, freeze, render, thaw
from lockstep.plan.render.pod import variable_warnings
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import MADE_BY_OPERATOR, PlatformDefaults, Refused
from lockstep_gang.contract.run import WhenDone, parse_run
from lockstep_spec.choices import StorageMode


def names(objects: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(item["kind"], item["metadata"]["name"]) for item in objects]


def frozen_hash(job_spec: dict[str, Any], profile_spec: dict[str, Any]) -> str:
    return freeze(resolve(job(**job_spec), profile(**profile_spec)), CONTEXT).hash


def test_what_pods_mount_is_created_before_the_pods() -> None:
    resolved = resolve(job(), profile())
    run = freeze(resolved, CONTEXT).name
    assert names(render(resolved, CONTEXT)) == [
        ("PersistentVolumeClaim", "ml-datasets"), ("PersistentVolumeClaim", "ml-dev-workspace"), ("Secret", "x-agents"),
        ("ConfigMap", run), ("NetworkPolicy", "x"), ("Service", "x-headless"), ("StatefulSet", "x"),
    ]  # fmt: skip


def test_everything_but_claims_is_owned_by_the_job() -> None:
    for item in render(resolve(job(), profile()), CONTEXT):
        owners = [(owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) for owner in item["metadata"].get("ownerReferences", [])]
        assert owners == ([] if item["kind"] == "PersistentVolumeClaim" else [(CONTEXT.owner_uid, True, False)])


def test_without_a_training_job_object_nothing_has_an_owner() -> None:
    context = RenderContext(agent_image="agent:1", key="0" * 64, owner_uid=None, report=None)
    assert not any("ownerReferences" in item["metadata"] for item in render(resolve(job(), profile()), context))


def test_everything_but_claims_carries_the_jobs_labels() -> None:
    for item in render(resolve(job(), profile()), CONTEXT):
        assert item["metadata"]["labels"].get("lockstep.dev/job") == (None if item["kind"] == "PersistentVolumeClaim" else "x")


@pytest.mark.parametrize(
    ("job_spec", "profile_spec", "expected"),
    [
        ({}, {}, [("ml-datasets", "ReadWriteMany", None), ("ml-dev-workspace", "ReadWriteMany", None)]),
        ({}, {"storage": {"classRwx": "nfs", "datasetsClaim": "texts"}},
            [("ml-dev-workspace", "ReadWriteMany", "nfs"), ("texts", "ReadWriteMany", "nfs")]),
        ({"storage": {"workspaceClaimName": "mine"}}, {}, [("ml-datasets", "ReadWriteMany", None)]),
        ({"storage": {"mode": "PerPod"}}, {}, []),
        (
            {"storage": {"mode": "PerPod"}},
            {"pod": {"volumes": [{"name": "py", "claim": "python", "mountPath": "/py", "storageClass": "ro"}]}},
            [("python", "ReadOnlyMany", "ro")],
        ),
        ({"storage": {"mode": "PerPod"}}, {"pod": {"volumes": [{"name": "py", "claim": "python", "mountPath": "/py"}]}}, []),
    ],
)  # fmt: skip
def test_claims_are_made_only_where_nobody_says_that_they_exist(
    job_spec: dict[str, Any], profile_spec: dict[str, Any], expected: list[tuple[str, str, str | None]]
) -> None:
    made = claims(resolve(job(**job_spec), profile(**profile_spec)))
    assert [(c["metadata"]["name"], c["spec"]["accessModes"][0], c["spec"].get("storageClassName")) for c in made] == expected


def test_every_pod_has_claims_of_its_own_in_per_pod_storage() -> None:
    (stateful_set,) = of_kind(render(resolve(job(), cluster("barcelona")), CONTEXT), "StatefulSet")
    found = [(claim["metadata"]["name"], claim["spec"]) for claim in stateful_set["spec"]["volumeClaimTemplates"]]
    assert [(name, spec["accessModes"], spec["resources"]["requests"]["storage"]) for name, spec in found] == [
        ("workspace", ["ReadWriteOnce"], "100Gi"), ("datasets", ["ReadWriteOnce"], "500Gi"),
    ]  # fmt: skip


def test_claims_are_kept_when_pods_and_job_go() -> None:
    (stateful_set,) = of_kind(render(resolve(job(), cluster("barcelona")), CONTEXT), "StatefulSet")
    assert stateful_set["spec"]["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Retain", "whenScaled": "Retain"}


def test_a_suspended_job_has_no_pods() -> None:
    (stateful_set,) = of_kind(render(resolve(job(suspend=True), profile()), CONTEXT), "StatefulSet")
    assert stateful_set["spec"]["replicas"] == 0


def test_the_run_says_whether_the_nodes_share_their_volume() -> None:
    modes = [parse_run(freeze(resolve(job(storage={"mode": mode}), profile()), CONTEXT).run).storage for mode in ("Shared", "PerPod")]
    assert modes == [StorageMode.SHARED, StorageMode.PER_POD]


def test_the_run_is_what_the_agents_parse() -> None:
    resolved = resolve(job(nodes=3, ranksPerNode=2), profile(), PlatformDefaults(namespace="team", uid="u-1"))
    run = parse_run(freeze(resolved, CONTEXT).run)
    assert (run.job.name, run.job.namespace, run.job.uid) == ("x", "team", "u-1")
    assert run.addresses == tuple(f"x-{node}.x-headless" for node in range(3))
    assert (run.world_size, run.gpus_per_node, run.when_done, run.run_dir) == (6, 0, WhenDone.WAIT, "/workspace/runs/x")
    assert run.training["optimization"]["learningRate"] == "2e-4"
    assert run.training["evaluation"] is None


def test_the_run_holds_no_variable_of_the_job() -> None:
    frozen = freeze(resolve(job(env=[{"name": "TOKEN", "value": "s3cret"}]), profile()), CONTEXT)
    assert "s3cret" not in frozen.run


def test_what_the_interpreter_or_the_loader_reads_reaches_ranks_and_not_the_agent() -> None:
    env = [{"name": name, "value": f"{name}-of-$job"} for name in ("LD_PRELOAD", "GLIBC_TUNABLES", "PYTHONPATH")]
    shared = {"env": [{"name": "LD_PRELOAD", "value": "p"}, {"name": "LD_LIBRARY_PATH", "value": "/p"}]}
    frozen = freeze(resolve(job(env=env), profile(pod=shared)), CONTEXT)
    assert parse_run(frozen.run).environment == {
        "LD_PRELOAD": "LD_PRELOAD-of-$job", "LD_LIBRARY_PATH": "/p", "GLIBC_TUNABLES": "GLIBC_TUNABLES-of-$job",
    }  # fmt: skip
    spec = json.loads(frozen.template)["pod"]["spec"]
    (trainer,), (agent,) = spec["containers"], spec["initContainers"]
    assert trainer["command"][:2] == ["python3", "-I"]
    given = {variable["name"] for container in (trainer, agent) for variable in container.get("env", [])}
    assert given & {"LD_PRELOAD", "LD_LIBRARY_PATH", "GLIBC_TUNABLES", "PYTHONPATH"} == {"PYTHONPATH"}


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"])
def test_a_variable_that_every_rank_gets_from_its_agent_is_said_to_have_no_effect(name: str) -> None:
    (notice,) = variable_warnings(job(env=[{"name": name, "value": "1"}]), profile())
    assert notice.message == f"{name} in the job's env has no effect: Lockstep sets it itself, remove it"


@pytest.mark.parametrize(
    ("job_spec", "profile_spec"),
    [
        ({"nodes": 3}, {}),
        ({"training": TRAINING | {"seed": 7}}, {}),
        ({"env": [{"name": "A", "value": "b"}]}, {}),
        ({"restart": {"maxRestarts": 9}}, {}),
        ({"resources": {"memory": "1Gi"}}, {}),
        ({"podTemplate": {"labels": {"team": "a"}}}, {}),
        ({"storage": {"mode": "PerPod"}}, {}),
        ({}, {"image": "trainer:2"}),
        ({}, {"shmSize": "1Gi"}),
        ({}, {"resources": {"limits": {"memory": "1Gi"}}}),
        ({}, {"platform": "Kubernetes"}),
    ],
)
def test_whatever_shapes_the_pods_changes_the_hash(job_spec: dict[str, Any], profile_spec: dict[str, Any]) -> None:
    assert frozen_hash(job_spec, profile_spec) != frozen_hash({}, {})


@pytest.mark.parametrize(
    ("job_spec", "profile_spec"), [({"suspend": True}, {}), ({"cluster": "p"}, {}), ({}, {"notes": "x"}), ({"nodes": 2}, {})]
)
def test_what_does_not_shape_the_pods_leaves_the_hash(job_spec: dict[str, Any], profile_spec: dict[str, Any]) -> None:
    assert frozen_hash(job_spec, profile_spec) == frozen_hash({}, {})


def test_a_running_gang_is_made_from_its_config_map_alone() -> None:
    resolved = resolve(job(), cluster("barcelona"))
    (config_map,) = of_kind(render(resolved, CONTEXT), "ConfigMap")
    read_back = thaw(json.loads(json.dumps(config_map)))
    again = children(read_back, owner_uid=CONTEXT.owner_uid, key=CONTEXT.key, replicas=2)
    assert again == children(freeze(resolved, CONTEXT), owner_uid=CONTEXT.owner_uid, key=CONTEXT.key, replicas=2)


def test_the_pods_mount_the_frozen_run_that_their_annotation_names() -> None:
    (stateful_set,) = of_kind(render(resolve(job(), profile()), CONTEXT), "StatefulSet")
    template = stateful_set["spec"]["template"]
    run_hash = template["metadata"]["annotations"]["lockstep.dev/run-hash"]
    (volume,) = [volume for volume in template["spec"]["volumes"] if "configMap" in volume]
    assert volume["configMap"] == {"name": f"x-run-{run_hash}", "items": [{"key": "run.json", "path": "run.json"}]}
    assert stateful_set["metadata"]["annotations"] == {"lockstep.dev/run-hash": run_hash}


def test_a_frozen_run_cannot_be_changed() -> None:
    (config_map,) = of_kind(render(resolve(job(), profile()), CONTEXT), "ConfigMap")
    assert config_map["immutable"] is True


@pytest.mark.parametrize("text", ["\x01", "<"])  # six bytes each, in Python's JSON or in the API server's
def test_a_run_too_large_to_keep_is_refused(text: str) -> None:
    large = job(env=[{"name": f"A{i}", "value": text * 8192} for i in range(32)])
    with pytest.raises(Refused, match="shorten them") as refused:
        freeze(resolve(large, profile()), CONTEXT)
    assert [refusal.reason for refusal in refused.value.refusals] == ["RunTooLarge"]


def test_plain_rendering_marks_what_only_the_operator_knows() -> None:
    frozen = freeze(resolve(job(), profile()), PLAIN)
    run = parse_run(frozen.run)
    (agent,) = json.loads(frozen.template)["pod"]["spec"]["initContainers"]
    assert {run.job.uid, run.report.ca_pem, agent["image"], PLAIN.key, PLAIN.owner_uid} == {MADE_BY_OPERATOR}
