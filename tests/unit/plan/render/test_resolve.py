"""resolve: every value has one layer, and a job that can't run is refused with every reason."""

from __future__ import annotations

from typing import Any

import pytest

from golden.plan_cases import TRAINING, cluster, job, profile, rdma_profile
from lockstep.api.files.jobfile import parse_job_file
from lockstep.plan.layers import Layer
from lockstep.plan.render.fabric import Transport
from lockstep.plan.render.resolve import describe_default_image, resolve, trainer_image
from lockstep.plan.render.resolved import MADE_BY_OPERATOR, PlatformDefaults, Refused, Resolved
from support.checkout import ROOT


def layer_of(resolved: Resolved, field: str) -> tuple[object, Layer]:
    (row,) = [row for row in resolved.settings if row.field == field]
    return row.value, row.layer


def reasons(refused: Refused) -> list[str]:
    return [refusal.reason for refusal in refused.refusals]


@pytest.mark.parametrize(
    ("field", "in_job", "in_profile", "expected"),
    [
        ("nodes", {"nodes": 3}, {"gpus": {"defaultNodes": 4}}, (3, Layer.JOB)),
        ("nodes", {}, {"gpus": {"defaultNodes": 4}}, (4, Layer.CLUSTER)),
        ("nodes", {}, {}, (2, Layer.DEFAULT)),
        ("gpusPerNode", {"gpusPerNode": 0}, {"gpus": {"perNode": 8}}, (0, Layer.JOB)),
        ("gpusPerNode", {}, {"gpus": {"perNode": 8}}, (8, Layer.CLUSTER)),
        ("gpusPerNode", {}, {}, (0, Layer.DEFAULT)),
        ("ranksPerNode", {"ranksPerNode": 5}, {}, (5, Layer.JOB)),
        ("ranksPerNode", {}, {"gpus": {"perNode": 8}}, (8, Layer.CLUSTER)),
        ("ranksPerNode", {}, {}, (1, Layer.DEFAULT)),
        ("image", {"image": "mine:1"}, {"image": "ours:1"}, ("mine:1", Layer.JOB)),
        ("image", {}, {"image": "ours:1"}, ("ours:1", Layer.CLUSTER)),
        ("storage.mode", {"storage": {"mode": "PerPod"}}, {}, ("PerPod", Layer.JOB)),
        ("storage.mode", {}, {"storage": {"mode": "PerPod"}}, ("PerPod", Layer.CLUSTER)),
        ("storage.mode", {}, {}, ("Shared", Layer.DEFAULT)),
        ("fabric.transport", {"fabric": {"mode": "TCP"}}, {}, ("TCP", Layer.JOB)),
        ("fabric.transport", {}, {"network": {"mode": "TCP"}}, ("TCP", Layer.CLUSTER)),
        ("restart.maxRestarts", {"restart": {"maxRestarts": 0}}, {}, (0, Layer.JOB)),
        ("restart.maxRestarts", {}, {}, (3, Layer.DEFAULT)),
        ("training.data.maxLength", {}, {}, (2048, Layer.DEFAULT)),
        ("resources.memory", {"resources": {"memory": "4Gi"}}, {}, ("4Gi", Layer.JOB)),
        ("cluster.shmSize", {}, {"shmSize": "1Gi"}, ("1Gi", Layer.CLUSTER)),
    ],
)
def test_the_strongest_layer_that_states_a_value_sets_it(
    field: str, in_job: dict[str, Any], in_profile: dict[str, Any], expected: tuple[object, Layer]
) -> None:
    assert layer_of(resolve(job(**in_job), profile(**in_profile)), field) == expected


def test_a_gang_that_the_profile_makes_too_large_is_refused_with_its_numbers() -> None:
    resolve(job(nodes=1024), profile(gpus={"perNode": 8}))
    with pytest.raises(Refused, match=r"1024 nodes with 16 ranks each are 16384 ranks, and a job may have at most 8192") as refused:
        resolve(job(nodes=1024), profile(gpus={"perNode": 16}))
    assert reasons(refused.value) == ["TooManyRanks"]


def test_the_platform_gives_the_image_that_nobody_states() -> None:
    resolved = resolve(job(), profile(image=None), PlatformDefaults(image="here:1"))
    assert layer_of(resolved, "image") == ("here:1", Layer.PLATFORM)


def test_every_field_is_explained_once() -> None:
    fields = [row.field for row in resolve(job(nodes=1), cluster("local")).settings]
    assert sorted(fields) == sorted(set(fields))


@pytest.mark.parametrize(
    ("operator", "trainer"),
    [
        ("registry.example.com:5000/team/lockstep-operator:0.1.0", "registry.example.com:5000/team/lockstep-trainer:0.1.0"),
        ("lockstep-operator:2", "lockstep-trainer:2"),
        ("r.example.com/lockstep-operator:1@sha256:ab", "r.example.com/lockstep-trainer:1"),
        ("r.example.com/lockstep-operator@sha256:ab", None),
        ("r.example.com/my-lockstep-operator:1", None),
        ("localhost/lockstep/base:1", None),
        (MADE_BY_OPERATOR, None),
    ],
)
def test_the_trainer_s_image_lies_beside_the_operator_s(operator: str, trainer: str | None) -> None:
    assert trainer_image(operator) == trainer


@pytest.mark.parametrize("operator", ["r.example.com/lockstep-operator:1", "r.example.com/mine:1", "localhost/lockstep/base:1"])
def test_what_is_said_of_a_missing_image_is_what_the_operator_does(operator: str) -> None:
    _, runs = describe_default_image(operator)
    try:
        found = resolve(job(), profile(image=None), PlatformDefaults(image=trainer_image(operator))).image
    except Refused as refused:
        assert not runs and [refusal.reason for refusal in refused.refusals] == ["NoImage"]
    else:
        assert runs and found in describe_default_image(operator)[0]


def test_a_job_without_an_image_anywhere_is_refused() -> None:
    with pytest.raises(Refused) as refused:
        resolve(job(), profile(image=None))
    assert reasons(refused.value) == ["NoImage"]


def test_rdma_is_refused_where_the_profile_has_none() -> None:
    with pytest.raises(Refused, match="the cluster p has no RDMA") as refused:
        resolve(job(fabric={"mode": "RDMA"}), profile(gpus={"perNode": 4}))
    assert reasons(refused.value) == ["RDMAUnavailable"]


def test_more_nodes_than_the_profile_lists_are_refused() -> None:
    with pytest.raises(Refused, match="nodes is 3, but the cluster barcelona allows 2") as refused:
        resolve(job(nodes=3), cluster("barcelona"))
    assert reasons(refused.value) == ["NotEnoughNodes"]


def test_all_reasons_are_told_at_once() -> None:
    with pytest.raises(Refused) as refused:
        resolve(job(nodes=9, fabric={"mode": "RDMA"}), profile(image=None, nodes={"gpuNodes": ["a", "b"]}))
    assert reasons(refused.value) == ["RDMAUnavailable", "NoImage", "NotEnoughNodes"]


@pytest.mark.parametrize(
    ("pod_template", "reason"),
    [
        ({"nodeSelector": {"zone": "b"}}, "NodeSelectorConflict"),
        ({"annotations": {"lockstep.dev/run-hash": "mine"}}, "AnnotationReserved"),
        ({"volumes": [{"name": "workspace", "mountPath": "/x", "emptyDir": {}}]}, "VolumeConflict"),
        ({"volumes": [{"name": "python", "mountPath": "/x", "emptyDir": {}}]}, "VolumeConflict"),
        ({"volumes": [{"name": "mine", "mountPath": "/opt/python/", "emptyDir": {}}]}, "VolumeConflict"),
        ({"volumes": [{"name": "mine", "mountPath": "//workspace", "emptyDir": {}}]}, "VolumeConflict"),
        ({"volumes": [{"name": "mine", "mountPath": "/a:b", "emptyDir": {}}]}, "VolumeConflict"),
    ],
)
def test_pods_that_could_never_be_made_are_refused(pod_template: dict[str, Any], reason: str) -> None:
    volumes = [{"name": "python", "claim": "python", "mountPath": "/opt/python"}]
    with pytest.raises(Refused) as refused:
        resolve(job(podTemplate=pod_template), profile(nodes={"selector": {"zone": "a"}}, pod={"volumes": volumes}))
    assert set(reasons(refused.value)) == {reason}


@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "requests.openshift.io/rail"])
def test_a_rail_resource_that_counts_no_nics_is_refused(resource: str) -> None:
    with pytest.raises(Refused, match=r"network[.]rdma[.]rails\[1\][.]resource") as refused:
        resolve(job(), rdma_profile(rails=[{"resource": "x.io/nic"}, {"resource": resource}]))
    assert reasons(refused.value) == ["RailResourceInvalid"]


def test_a_networks_annotation_beside_the_rails_is_refused() -> None:
    annotated = job(podTemplate={"annotations": {"k8s.v1.cni.cncf.io/networks": "mine"}})
    with pytest.raises(Refused) as refused:
        resolve(annotated, rdma_profile(rails=[{"network": "rail"}]))
    assert reasons(refused.value) == ["AnnotationReserved"]


def test_an_empty_claim_is_refused() -> None:
    with pytest.raises(Refused, match=r"storage[.]workspaceSize of the cluster p is 0Gi") as refused:
        resolve(job(), profile(storage={"workspaceSize": "0Gi"}))
    assert reasons(refused.value) == ["ClaimSizeInvalid"]


def test_a_workspace_claim_is_refused_where_every_pod_has_a_volume_of_its_own() -> None:
    with pytest.raises(Refused) as refused:
        resolve(job(storage={"workspaceClaimName": "mine"}), profile(storage={"mode": "PerPod"}))
    assert reasons(refused.value) == ["WorkspaceClaimPerPod"]


@pytest.mark.parametrize(
    ("mode", "network", "gpus", "expected"),
    [
        ("Auto", {"rdma": {"enabled": True}}, 4, Transport.RDMA),
        ("Auto", {"rdma": {"enabled": True}}, 0, Transport.TCP),
        ("Auto", {"rdma": {"enabled": False}}, 4, Transport.TCP),
        ("Auto", {"rdma": {"enabled": True}, "mode": "TCP"}, 4, Transport.TCP),
        ("RDMA", {"rdma": {"enabled": True}, "mode": "TCP"}, 4, Transport.RDMA),
        ("RDMA", {"rdma": {"enabled": True}}, 0, Transport.RDMA),
        ("TCP", {"rdma": {"enabled": True}, "mode": "RDMA"}, 4, Transport.TCP),
    ],
)
def test_the_transport_is_the_jobs_else_the_profiles_else_rdma_for_gpus(
    mode: str, network: dict[str, Any], gpus: int, expected: Transport
) -> None:
    assert resolve(job(fabric={"mode": mode}, gpusPerNode=gpus), profile(network=network, security={"ipcLock": True})).transport is expected


@pytest.mark.parametrize(
    ("spec", "rdma", "expected"),
    [
        ({}, {}, ["NoRails"]),
        ({}, {"rails": [{"network": "rail"}]}, []),
        ({"fabric": {"mode": "RDMA"}, "gpusPerNode": 0}, {"rails": [{"network": "rail"}]}, ["RDMAWithoutGPUs"]),
        ({"env": [{"name": "MASTER_ADDR", "value": "x"}]}, {"rails": [{"network": "rail"}]}, ["VariableIgnored"]),
    ],
)
def test_what_is_probably_not_meant_is_warned_of(spec: dict[str, Any], rdma: dict[str, Any], expected: list[str]) -> None:
    assert [warning.reason for warning in resolve(job(**spec), rdma_profile(**rdma)).warnings] == expected


def test_a_job_that_is_as_init_writes_it_is_warned_of() -> None:
    written = parse_job_file(
        (ROOT / "operator/lockstep/cli/clusters/scaffolds/job.yaml").read_text().replace("NAME", "x").replace("CLUSTER", "c"), "job.yaml"
    )
    (warning,) = resolve(written, profile(), PlatformDefaults(namespace="x")).warnings
    assert warning.reason == "Placeholder" and "/workspace/models/MODEL" in warning.message and "/datasets/train.jsonl" in warning.message
    training = TRAINING | {"model": {"name": "/workspace/models/mine"}, "data": {"path": "/datasets/train.jsonl"}}
    assert not resolve(job(training=training), profile(), PlatformDefaults(namespace="x")).warnings


def test_paths_move_with_the_folders_of_the_platform() -> None:
    training = TRAINING | {"checkpoint": {"resumeFrom": "/workspace/runs/old"}}
    here = PlatformDefaults(workspace="/home/me/work", datasets="/home/me/data")
    moved = resolve(job(training=training), profile(), here).training
    assert (moved.model.name, moved.data.path) == ("/home/me/work/models/base", "/home/me/data/text.jsonl")
    assert moved.checkpoint.resume_from == "/home/me/work/runs/old"


def test_paths_that_only_look_like_the_workspace_stay() -> None:
    training = {"model": {"name": "/workspaces/base"}, "data": {"path": "/data"}}
    stayed = resolve(job(training=training), profile(), PlatformDefaults(workspace="/w", datasets="/d")).training
    assert (stayed.model.name, stayed.data.path, stayed.checkpoint.resume_from) == ("/workspaces/base", "/data", "Auto")


def test_a_script_is_started_with_its_arguments_as_they_are() -> None:
    script = {"path": "/workspace/a.py", "args": ["--x", "$(Y)", "a b"]}
    assert resolve(job(script=script), profile(), PlatformDefaults(workspace="/w")).command == ("python3", "/w/a.py", "--x", "$(Y)", "a b")


def test_the_namespace_of_the_job_wins_over_the_platforms() -> None:
    here = PlatformDefaults(namespace="there")
    named = job().model_copy(update={"metadata": job().metadata.model_copy(update={"namespace": "mine"})})
    assert (resolve(named, profile(), here).namespace, resolve(job(), profile(), here).namespace) == ("mine", "there")


@pytest.mark.parametrize(
    ("gpus", "wanted", "warned"),
    [
        ({"perNode": 0}, 4, None),
        ({"perNode": 4}, 8, "nodes of cluster p have 4"),
        ({"perNode": 4}, 4, None),
        ({"perNode": 4}, None, None),
        ({}, 4, None),
    ],
)
def test_more_gpus_than_the_cluster_says_its_nodes_have_are_warned_of(gpus: dict[str, Any], wanted: int | None, warned: str | None) -> None:
    given = job(nodes=1, script={"path": "a.py"}, **({} if wanted is None else {"gpusPerNode": wanted}))
    warnings = resolve(given, profile(platform="Kubernetes", image="i", gpus=gpus), PlatformDefaults(namespace="x")).warnings
    assert [one.reason for one in warnings] == ([] if warned is None else ["MoreGPUsThanNodesHave"])
    assert all(warned is not None and warned in one.message for one in warnings)


@pytest.mark.parametrize(
    ("script", "command", "folder"),
    [
        ({"path": "a.py"}, "python3 a.py x", "/w"),
        ({"path": "/workspace/a.py"}, "python3 /w/a.py x", "/w"),
        ({"path": "repo/a.py"}, "python3 a.py x", "/w/repo"),
        ({"path": "./repo/../a.py"}, "python3 a.py x", "/w"),
        ({"path": "/opt/app/a.py"}, "python3 /opt/app/a.py x", "/opt/app"),
        ({"path": "/datasets/code/a.py"}, "python3 /d/code/a.py x", "/d/code"),
        ({"folder": "repo", "path": "bin/a.py"}, "python3 bin/a.py x", "/w/repo"),
        ({"folder": "/workspace", "path": "repo/a.py"}, "python3 repo/a.py x", "/w"),
        ({"folder": "/opt/app", "path": "/workspace/a.py"}, "python3 /w/a.py x", "/opt/app"),
        ({"module": "pkg.train"}, "python3 -m pkg.train x", "/w"),
        ({"module": "pkg.train", "folder": "repo"}, "python3 -m pkg.train x", "/w/repo"),
        ({"command": ["bash", "run.sh"], "folder": "repo/"}, "bash run.sh x", "/w/repo"),
    ],
)
def test_ranks_work_in_the_folder_of_their_script_or_in_the_one_that_is_stated(script: dict[str, Any], command: str, folder: str) -> None:
    resolved = resolve(job(script={**script, "args": ["x"]}), profile(), PlatformDefaults("/w", "/d"))
    assert (" ".join(resolved.command), resolved.folder) == (command, folder)
