"""The pods of a job: variables, rights, volumes, placement, and text that comes through unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from golden.plan_cases import (
    CONTEXT,
    HOSTILE,
    cluster,
    expanded,
    job,
    of_kind,
    pod_of,
    profile,
    rdma_profile,
    trainer_of,
    variables_of,
)
from lockstep.api.cluster import TrainingCluster
from lockstep.api.job import TrainingJob
from lockstep.plan.render.objects import RenderContext, differs_by_user, freeze, render
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.template import fill
from lockstep_gang.contract.run import parse_run
from support.checkout import ROOT


def objects(a_job: TrainingJob, a_profile: TrainingCluster) -> list[dict[str, Any]]:
    return render(resolve(a_job, a_profile), CONTEXT)


def test_the_jobs_env_wins_over_everything_but_lockstep() -> None:
    env = [{"name": name, "value": "job"} for name in ("NCCL_ALGO", "OMP_NUM_THREADS", "HOME", "NNODES")]
    stated = profile(
        pod={"env": [{"name": "OMP_NUM_THREADS", "value": "1"}]},
        gpus={"perNode": 1},
        nccl={"env": [{"name": "NCCL_ALGO", "value": "cluster"}]},
    )
    variables = variables_of(objects(job(env=env), stated))
    assert {name: variables[name] for name in ("NCCL_ALGO", "OMP_NUM_THREADS", "HOME", "NNODES")} == {
        "NCCL_ALGO": "job", "OMP_NUM_THREADS": "job", "HOME": "job", "NNODES": "2",
    }  # fmt: skip


def test_every_variable_is_there_once() -> None:
    env = [{"name": "NCCL_ALGO", "value": "a"}, {"name": "HOME", "value": "b"}]
    names = [item["name"] for item in trainer_of(objects(job(env=env, gpusPerNode=1), cluster("local")))["env"]]
    assert sorted(names) == sorted(set(names))


def test_secrets_are_passed_on_as_references() -> None:
    env = [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token", "optional": True}}}]
    container = trainer_of(objects(job(env=env, envFrom=[{"secretRef": {"name": "s"}}]), profile()))
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token", "optional": True}}} in container["env"]
    assert container["envFrom"] == [{"secretRef": {"name": "s"}}]


def test_rdma_pods_are_root_with_ipc_lock_and_nothing_else() -> None:
    pod = pod_of(objects(job(), cluster("barcelona")))
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}, "runAsNonRoot": False, "runAsUser": 0,
    }  # fmt: skip
    assert pod["initContainers"][0]["securityContext"]["runAsNonRoot"] is True


def is_restricted(pod: dict[str, Any]) -> bool:
    """Pod Security Standards, level restricted, as far as a pod of ours can break it."""
    contexts = [container["securityContext"] for container in (*pod["containers"], *pod["initContainers"])]
    kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
    return (
        all(context["allowPrivilegeEscalation"] is False and context["runAsNonRoot"] for context in contexts)
        and all(context["capabilities"] == {"drop": ["ALL"]} for context in contexts)
        and all(context.get("runAsUser") != 0 for context in contexts)
        and pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        and kinds <= {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
        and not any(pod.get(key) for key in ("hostNetwork", "hostIPC", "hostPID"))
    )


@pytest.mark.parametrize(
    "a_profile",
    [cluster("local"), cluster("nerc-production"), rdma_profile(memlock="Unlimited", spec={"security": {}})],
    ids=["kubernetes", "openshift", "rdma with lifted memlock"],
)
def test_pods_that_need_no_locked_memory_are_restricted(a_profile: TrainingCluster) -> None:
    assert is_restricted(pod_of(objects(job(), a_profile)))


def test_rdma_pods_with_ipc_lock_are_not_restricted() -> None:
    assert not is_restricted(pod_of(objects(job(), cluster("barcelona"))))


def test_user_ids_are_stated_on_kubernetes_and_left_to_openshift() -> None:
    kubernetes = pod_of(objects(job(), cluster("local")))
    openshift = pod_of(objects(job(), cluster("nerc-production")))
    assert kubernetes["containers"][0]["securityContext"]["runAsUser"] == kubernetes["securityContext"]["fsGroup"] == 1000
    assert "runAsUser" not in openshift["containers"][0]["securityContext"]
    assert "fsGroup" not in openshift["securityContext"]


@pytest.mark.parametrize("a_profile", [cluster("local"), cluster("barcelona")], ids=["kubernetes", "openshift"])
def test_no_pod_start_walks_a_whole_volume_whoever_states_the_group(a_profile: TrainingCluster) -> None:
    assert pod_of(objects(job(), a_profile))["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_root_of_rdma_pods_has_the_group_of_all_other_pods() -> None:
    rdma = rdma_profile(spec={"platform": "Kubernetes", "security": {"ipcLock": True}})
    root, other = (pod_of(objects(job(fabric={"mode": mode}), rdma))["containers"][0]["securityContext"] for mode in ("RDMA", "TCP"))
    assert (root["runAsUser"], other["runAsUser"]) == (0, 1000)
    assert root["runAsGroup"] == other["runAsGroup"]


def test_the_scc_of_rdma_pods_gives_them_the_namespace_s_group_as_restricted_v2_does() -> None:
    """Without it they had none, and could write nothing that other pods had written."""
    path = ROOT / "manifests/operator/overlays/openshift/scc.yaml"
    assert yaml.safe_load(path.read_text())["fsGroup"] == {"type": "MustRunAs"}


def test_pods_get_no_token_of_the_api_server() -> None:
    pod = pod_of(objects(job(), profile()))
    tokens = [volume["projected"]["sources"] for volume in pod["volumes"] if "projected" in volume]
    assert pod["automountServiceAccountToken"] is False
    assert [[source["serviceAccountToken"]["audience"] for source in sources] for sources in tokens] == [["lockstep.dev/report"]]


def test_pods_get_no_report_token_where_there_is_no_operator() -> None:
    context = RenderContext(agent_image="agent:1", key="0" * 64, owner_uid=None, report=None)
    pod = pod_of(render(resolve(job(), profile()), context))
    assert not [volume for volume in pod["volumes"] if "projected" in volume]
    assert not [mount for mount in pod["containers"][0]["volumeMounts"] if mount["mountPath"].startswith("/var/run")]


def test_every_mount_has_its_volume_and_every_volume_its_mount() -> None:
    for mode in ("Shared", "PerPod"):
        (stateful_set,) = of_kind(objects(job(storage={"mode": mode}), cluster("local")), "StatefulSet")
        pod = stateful_set["spec"]["template"]["spec"]
        claims = [claim["metadata"]["name"] for claim in stateful_set["spec"].get("volumeClaimTemplates", [])]
        mounted = [mount["name"] for mount in pod["containers"][0]["volumeMounts"]]
        assert sorted(mounted) == sorted([volume["name"] for volume in pod["volumes"]] + claims)


INFRA = {"key": "dedicated", "operator": "Equal", "value": "training", "effect": "NoSchedule"}
GPU_TAINT = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


def test_pods_tolerate_what_the_job_says_then_what_the_profile_does_each_once() -> None:
    own = {"key": "spot", "operator": "Exists"}
    some_profile = profile(pod={"tolerations": [INFRA, GPU_TAINT, own]}, gpus={"perNode": 1})
    assert pod_of(objects(job(podTemplate={"tolerations": [own]}), some_profile))["tolerations"] == [own, INFRA, GPU_TAINT]
    assert pod_of(objects(job(gpusPerNode=0), profile(pod={"tolerations": [INFRA]})))["tolerations"] == [INFRA]


def test_the_jobs_registry_logins_come_before_the_profiles_each_once() -> None:
    pod = pod_of(objects(job(imagePullSecrets=[{"name": "own"}, {"name": "both"}]), profile(pod={"imagePullSecrets": ["both", "all"]})))
    assert pod["imagePullSecrets"] == [{"name": "own"}, {"name": "both"}, {"name": "all"}]


@pytest.mark.parametrize(("gpus", "expected"), [(1, "nvidia"), (0, None)])
def test_the_runtime_class_is_that_of_pods_with_gpus(gpus: int, expected: str | None) -> None:
    assert pod_of(objects(job(gpusPerNode=gpus), profile(pod={"runtimeClassName": "nvidia"}))).get("runtimeClassName") == expected


def test_gpu_pods_tolerate_the_gpu_taint_and_cpu_pods_do_not() -> None:
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert pod_of(objects(job(gpusPerNode=1), profile()))["tolerations"] == [taint]
    assert "tolerations" not in pod_of(objects(job(gpusPerNode=0), profile()))


def test_pods_of_a_job_are_kept_apart_and_preferably_in_one_rack() -> None:
    affinity = pod_of(objects(job(), profile(nodes={"rackLabel": "dc/rack"})))["affinity"]
    (apart,) = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (rack,) = affinity["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert (apart["topologyKey"], rack["podAffinityTerm"]["topologyKey"]) == ("kubernetes.io/hostname", "dc/rack")
    assert apart["labelSelector"] == rack["podAffinityTerm"]["labelSelector"] == {"matchLabels": {"lockstep.dev/job": "x"}}


def test_selectors_of_job_and_profile_are_both_asked_of_a_node() -> None:
    pod = pod_of(objects(job(podTemplate={"nodeSelector": {"zone": "a"}}), profile(nodes={"selector": {"gpu": "h100"}})))
    assert pod["nodeSelector"] == {"zone": "a", "gpu": "h100"}


def test_what_the_job_adds_to_its_pods_is_there() -> None:
    added = {
        "labels": {"team": "a"}, "annotations": {"note": "b"}, "priorityClassName": "high", "schedulerName": "volcano",
        "tolerations": [{"key": "spot", "operator": "Equal", "value": "yes", "effect": "NoExecute", "tolerationSeconds": 30}],
    }  # fmt: skip
    (stateful_set,) = of_kind(objects(job(podTemplate=added, imagePullSecrets=[{"name": "login"}]), profile()), "StatefulSet")
    metadata, pod = stateful_set["spec"]["template"]["metadata"], stateful_set["spec"]["template"]["spec"]
    assert (metadata["labels"]["team"], metadata["annotations"]["note"]) == ("a", "b")
    assert (pod["priorityClassName"], pod["tolerations"], pod["imagePullSecrets"]) == ("high", added["tolerations"], [{"name": "login"}])
    assert pod["schedulerName"] == "volcano"


@pytest.mark.parametrize(("stated", "grace", "save"), [(3600, 3600, 3570), (60, 60, 30), (None, 180, 150)])
def test_ranks_may_take_almost_as_long_to_save_as_their_pod_to_stop(stated: int | None, grace: int, save: int) -> None:
    template = {} if stated is None else {"terminationGracePeriodSeconds": stated}
    found = objects(job(podTemplate=template), profile())
    (config_map,) = of_kind(found, "ConfigMap")
    assert pod_of(found)["terminationGracePeriodSeconds"] == grace
    assert parse_run(config_map["data"]["run.json"]).save_grace_seconds == save


def test_a_queue_is_written_where_kueue_reads_it_and_nowhere_else() -> None:
    found = objects(job(queueName="team-a"), profile())
    labeled = [item["kind"] for item in found if "kueue.x-k8s.io/queue-name" in item["metadata"]["labels"]]
    assert labeled == ["StatefulSet"]
    (stateful_set,) = of_kind(found, "StatefulSet")
    assert stateful_set["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert "kueue.x-k8s.io/queue-name" not in stateful_set["spec"]["template"]["metadata"]["labels"]
    assert "kueue.x-k8s.io/queue-name" not in stateful_set["spec"]["selector"]["matchLabels"]


@pytest.mark.parametrize(
    ("source", "volume", "mount"),
    [
        ({"configMap": {"name": "c"}}, {"configMap": {"name": "c"}}, {}),
        ({"secret": {"secretName": "s"}}, {"secret": {"secretName": "s"}}, {}),
        ({"emptyDir": {}}, {"emptyDir": {}}, {}),
        ({"persistentVolumeClaim": {"claimName": "c"}}, {"persistentVolumeClaim": {"claimName": "c"}}, {}),
        ({"persistentVolumeClaim": {"claimName": "c", "readOnly": False}}, {"persistentVolumeClaim": {"claimName": "c"}}, {}),
        (
            {"persistentVolumeClaim": {"claimName": "c", "readOnly": True}},
            {"persistentVolumeClaim": {"claimName": "c", "readOnly": True}},
            {"readOnly": True},
        ),
    ],
)
def test_a_volume_of_the_job_is_mounted_where_it_says(source: dict[str, Any], volume: dict[str, Any], mount: dict[str, Any]) -> None:
    pod = pod_of(objects(job(podTemplate={"volumes": [{"name": "mine", "mountPath": "/mine"} | source]}), profile()))
    assert {"name": "mine"} | volume in pod["volumes"]
    assert {"name": "mine", "mountPath": "/mine"} | mount in pod["containers"][0]["volumeMounts"]


def test_the_profiles_volumes_are_read_only_in_every_container() -> None:
    volumes = [{"name": "python", "claim": "env", "mountPath": "/opt/python"}]
    pod = pod_of(objects(job(), profile(pod={"volumes": volumes})))
    assert {"name": "python", "persistentVolumeClaim": {"claimName": "env", "readOnly": True}} in pod["volumes"]
    for container in (*pod["initContainers"], *pod["containers"]):
        assert {"name": "python", "mountPath": "/opt/python", "readOnly": True} in container["volumeMounts"]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_reaches_the_pod_unchanged(text: str) -> None:
    hostile = job(
        env=[{"name": "TEXT", "value": text}],
        podTemplate={"annotations": {"text": text}},
        script={"path": text or "x", "args": [text]},
    )
    made = objects(hostile, profile(pod={"env": [{"name": "PROFILE_TEXT", "value": text}]}))
    (stateful_set,) = of_kind(made, "StatefulSet")
    (config_map,) = of_kind(made, "ConfigMap")
    seen = {name: expanded(value, {"HOME": "wrong"}) for name, value in variables_of(made).items()}
    assert seen["TEXT"] == seen["PROFILE_TEXT"] == text
    assert stateful_set["spec"]["template"]["metadata"]["annotations"]["text"] == text
    assert json.loads(config_map["data"]["run.json"])["command"] == ["python3", text or "x", text]


VALUES = st.recursive(
    st.text() | st.integers() | st.booleans(),
    lambda values: st.lists(values, min_size=1) | st.dictionaries(st.text(max_size=150), values, min_size=1),
)
"""Values that a Kubernetes object may have. YAML reads keys of up to 1,024 characters, escapes included; Kubernetes' own have 317."""


@given(VALUES)
@example(HOSTILE)
@example({text: text for text in HOSTILE})
def test_a_template_reads_back_every_value_as_it_was(value: object) -> None:
    assert fill("configmap", metadata={"name": "a"}, data=value)["data"] == value


def test_text_that_no_yaml_holds_is_refused_by_the_job() -> None:
    with pytest.raises(ValidationError):
        job(env=[{"name": "TEXT", "value": "\ud800"}])


def test_a_value_that_is_not_given_is_an_error() -> None:
    with pytest.raises(TypeError, match="Undefined"):
        fill("configmap", metadata={})


def test_the_operators_image_and_certificate_are_part_of_the_frozen_run() -> None:
    resolved = resolve(job(), profile())
    other = RenderContext(
        agent_image="lockstep-operator:0.2.0", key=CONTEXT.key, owner_uid=CONTEXT.owner_uid, report=CONTEXT.report, build="another"
    )
    assert freeze(resolved, CONTEXT).hash != freeze(resolved, other).hash
    assert not differs_by_user(freeze(resolved, CONTEXT), freeze(resolved, other))
    assert freeze(resolved, other).parsed.build == "another"
