"""Cases for every CEL rule of the CRDs: an object that keeps it and one that breaks it. Used against the models and a real API server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.api.crd import training_cluster_crd, training_job_crd

Object = dict[str, Any]


@dataclass(frozen=True)
class WrittenRule:
    """A rule as the CRD has it: the kind, the path of the schema that holds it, and its message."""

    kind: str
    path: str
    message: str


@dataclass(frozen=True)
class Case:
    """`field` is where the API server says that the refused object is wrong. `before`: the two are updates of this object."""

    accepted: Object
    refused: Object
    field: str
    before: Object | None = None


def written_rules() -> Iterator[WrittenRule]:
    for crd in (training_job_crd(), training_cluster_crd()):
        yield from _rules(crd["spec"]["names"]["kind"], "", crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])


def _rules(kind: str, path: str, schema: Object) -> Iterator[WrittenRule]:
    for rule in schema.get("x-kubernetes-validations", ()):
        yield WrittenRule(kind, path, rule["message"])
    for name, inner in schema.get("properties", {}).items():
        yield from _rules(kind, f"{path}.{name}" if path else name, inner)
    for key, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if key in schema:
            yield from _rules(kind, path + mark, schema[key])


def job(name: str = "x", **spec: Any) -> Object:
    work = {} if {"training", "script", "type"} & spec.keys() else {"script": {"path": "a.py"}}
    return {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": name}, "spec": work | spec}


def training(**fields: Any) -> Object:
    return job(training={"model": {"name": "/m"}, "data": {"path": "/d"}} | fields)


def profile(**spec: Any) -> Object:
    return {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingCluster", "metadata": {"name": "x"}, "spec": spec}


def rdma(**fields: Any) -> Object:
    return {"network": {"rdma": fields}}


def env(**variable: Any) -> Object:
    return job(env=[{"name": "A"} | variable])


def variables(count: int) -> list[Object]:
    """Variables of 8 KiB each, two characters in three bytes."""
    return [{"name": f"A{number}", "value": "éb" * 2730 + "bb"} for number in range(count)]


def notes(count: int) -> Object:
    """Annotations of 16,384 bytes each, without their keys."""
    return {f"note-{number:02}": "\U0001f980" * 4096 for number in range(count)}


def volume(**fields: Any) -> Object:
    return job(podTemplate={"volumes": [{"name": "v", "mountPath": "/v"} | fields]})


NUMBERS: list[tuple[str, str, list[Any], list[Any]]] = [
    ("optimization", "learningRate", [0, 1, 0.1, 1e-4, 0.0, 1e15, "1e-4", "0.5", "12", "1e99"],
        [-1, -1e-4, 1e16, True, False, [], {}, [1], {"a": 1}, "", "-1", "x", "0x1", "1e400", " 1", "1" * 25]),
    ("optimization", "weightDecay", [0.01, "0.01"], [-0.01, "a"]),
    ("optimization", "beta2", [0, 0.95, "0.999", "9.5e-1", "0"], [1, 1.0, -0.1, "1", "1.0", "9e0", True]),
    ("optimization", "warmupSteps", [0.03, "0.1", "3e-2", 150], [-0.1, "a tenth"]),
    ("optimization", "maxGradientNorm", [1, 1.0, "1.0"], [-1, True]),
    ("lora", "dropout", [0, 0.05, "0.05"], [-0.05, "half"]),
    ("evaluation", "holdout", [0.1, 0.5, 1e-3, "0.1", "5e-1", "0.50", "0.02"],
        [0, 0.0, 0.51, 1, -0.1, "0", "0.6", "0.0", "1", "50e-2", "5.1e-1", True, []]),
]  # fmt: skip
"""Section and field of spec.training, and what a field that is a number or text takes, and what not."""
AMOUNTS: list[Any] = [16, 0.5, 0.001, 1e15, "16", "500m", "96Gi", "0.50", "0"]
NO_AMOUNTS: list[Any] = [0, -1, 1e16, True, [], {}, "", "16 GB", "1e3", "-1", "1" * 33]
"""Values that spec.resources takes, and others."""
SECRET_KEY = {"secretKeyRef": {"name": "s", "key": "k"}}
NO_PASSWORD = (
    "{} must not contain a password or a port (: or @ before an address's first /, or sig=): pass an object store's credentials in env"
)
NO_REVISION = "revision may only be set with name: files and object stores have no revisions"
LABEL_KEYS = "keys must be label keys such as rack or example.com/rack"
KEY_PREFIX = "the part of a label key before / must have at most 253 characters"
LONGEST_PREFIX = ".".join(["a" * 63] * 3 + ["a" * 61])
TOO_LONG_PREFIX = f"b.{LONGEST_PREFIX}"

TOLERATIONS = (
    ("key must be set unless operator is Exists", {"operator": "Exists"}, {"operator": "Equal", "value": "b"}, "key"),
    (
        "value may not be set when operator is Exists",
        {"key": "a", "operator": "Exists", "value": ""},
        {"key": "a", "operator": "Exists", "value": "b"},
        "value",
    ),
    (
        "tolerationSeconds may only be set when effect is NoExecute",
        {"key": "a", "effect": "NoExecute", "tolerationSeconds": 0},
        {"key": "a", "effect": "NoSchedule", "tolerationSeconds": 3},
        "tolerationSeconds",
    ),
)

JOB_CASES = {
    ("", "metadata.name must be at most 52 characters: lower-case letters, digits and '-', starting with a letter (pods, Services and"
         " labels are named after it)"): Case(
        job("a" + "b" * 51), job("a" * 53), ""
    ),
    ("spec", "must have exactly one of training and script, and neither when type is Interactive"): Case(
        job(type="Interactive"), training() | {"spec": training()["spec"] | {"script": {"path": "a.py"}}}, "spec"
    ),
    ("spec", "idleSeconds may only be set when type is Interactive"): Case(
        job(type="Interactive", idleSeconds=0), job(idleSeconds=0), "spec.idleSeconds"
    ),
    ("spec", "activeDeadlineSeconds, ttlSecondsAfterFinished and hangTimeouts may only be set when type is Batch: an Interactive job has no"
             " end, and its runs are not restarted"): Case(
        job(activeDeadlineSeconds=60), job(type="Interactive", activeDeadlineSeconds=60), "spec"
    ),
    ("spec", "restart.maxRestarts and restart.backoffSeconds may only be set when type is Batch: runs of an Interactive job are not"
             " restarted"): Case(
        job(type="Interactive", restart={"lostNodeSeconds": 60}), job(type="Interactive", restart={"maxRestarts": 0}), "spec.restart"
    ),
    ("spec", "type may not be changed after creation: delete the job and create it again"): Case(
        job(nodes=3), job(type="Interactive"), "spec.type", before=job()
    ),
    ("spec", "ranksPerNode may only be set when gpusPerNode is 0: every GPU has one rank"): Case(
        job(gpusPerNode=0, ranksPerNode=2), job(gpusPerNode=4, ranksPerNode=2), "spec.ranksPerNode"
    ),
    ("spec", "a job may have at most 8192 ranks, nodes times gpusPerNode (or ranksPerNode): use fewer nodes, or several jobs"): Case(
        job(nodes=1024, gpusPerNode=8), job(nodes=513, gpusPerNode=0, ranksPerNode=16), "spec.nodes"
    ),
    ("spec", "hangTimeouts takes stepSeconds and collectiveSeconds with training, which has limits of its own for the rest, and all but"
             " collectiveSeconds with script"): Case(
        job(hangTimeouts={"stepSeconds": 60, "saveSeconds": 60}),
        job(hangTimeouts={"collectiveSeconds": 60}),
        "spec.hangTimeouts",
    ),
    (
        "spec",
        "cluster may not be changed after creation, except from unset: delete the job and create it again; its checkpoints are found"
        " under its name",
    ): Case(
        job(cluster="a", nodes=3), job(cluster="b"), "spec.cluster", before=job(cluster="a")
    ),
    ("spec.restart", "retry may only be raised"): Case(
        job(restart={"retry": 2}), job(restart={"retry": 0}), "spec.restart.retry", before=job(restart={"retry": 1})
    ),
    ("spec", "storage may not be changed after creation: volumes are not moved under a job"): Case(
        job(storage={"mode": "PerPod"}, suspend=True), job(), "spec.storage", before=job(storage={"mode": "PerPod"})
    ),
    ("spec.storage", "workspaceClaimName may not be set when mode is PerPod"): Case(
        job(storage={"mode": "Shared", "workspaceClaimName": "c"}),
        job(storage={"mode": "PerPod", "workspaceClaimName": "c"}),
        "spec.storage.workspaceClaimName",
    ),
    (
        "spec.training",
        "model may not be changed after creation, except for its tokenSecret: create another job for another base model",
    ): Case(
        training(model={"name": "org/m", "revision": "v1", "tokenSecret": {"name": "hub"}}),
        training(model={"name": "org/m", "revision": "v2"}),
        "spec.training.model",
        before=training(model={"name": "org/m", "revision": "v1"}),
    ),
    ("spec.training.model", "revision needs the name of a model of the hub, such as org/name"): Case(
        training(model={"name": "org/m", "revision": "v1"}), training(model={"name": "/m", "revision": "v1"}),
            "spec.training.model.revision"
    ),
    (
        "spec.training.model",
        "tokenSecret needs the name of a model of the hub, such as org/name; an object store's credentials go into env",
    ): Case(
        training(model={"name": "gpt2", "tokenSecret": {"name": "hub"}}),
        training(model={"name": "s3://bucket/m", "tokenSecret": {"name": "hub"}}),
        "spec.training.model.tokenSecret",
    ),
    ("spec.training.optimization", "globalBatchSize must be greater than or equal to microBatchSize"): Case(
        training(optimization={"globalBatchSize": 4, "microBatchSize": 4}),
        training(optimization={"globalBatchSize": 3, "microBatchSize": 4}),
        "spec.training.optimization.globalBatchSize",
    ),
    ("spec.training.optimization", "balance Measured needs batches Tokens: ranks that are unlike share a step's tokens"): Case(
        training(optimization={"batches": "Tokens", "balance": "Measured"}),
        training(optimization={"batches": "Rows", "balance": "Measured"}),
        "spec.training.optimization.balance",
    ),
    (
        "spec.training",
        "model.quantization needs zeroStage Stage1 or Stage2 and method LoRA: Stage3 would cut packed weights into shards",
    ): Case(
        training(model={"name": "/m", "quantization": "NF4"}, zeroStage="Stage2"),
        training(model={"name": "/m", "quantization": "NF4"}, zeroStage="Stage3"),
        "spec.training.model.quantization",
    ),
    ("spec.training", "hierarchicalPartition Node needs zeroStage Stage3"): Case(
        training(hierarchicalPartition="Node", zeroStage="Stage3"),
        training(hierarchicalPartition="Node", zeroStage="Stage2"),
        "spec.training.hierarchicalPartition",
    ),
    ("spec.training.lora", 'targetParameters need dropout 0 and dora false'): Case(
        training(lora={"targetParameters": ["mlp.experts.gate_up_proj"]}),
        training(lora={"targetParameters": ["mlp.experts.gate_up_proj"], "dora": True}),
        "spec.training.lora.targetParameters",
    ),
    ("spec.training.model", NO_PASSWORD.format("name")): Case(
        training(model={"name": "abfs://container@account/m@v1"}),
        training(model={"name": "s3://key:a/word@bucket/m"}),
        "spec.training.model.name",
    ),
    ("spec.training.data", NO_PASSWORD.format("path")): Case(
        training(data={"path": "/d://a:b@c"}), training(data={"path": "s3://word@bucket/d"}), "spec.training.data.path"
    ),
    ("spec.training.data.sources[]", NO_PASSWORD.format("path")): Case(
        training(data={"sources": [{"path": "gs://anonymous@bucket/a:b"}]}),
        training(data={"sources": [{"path": "gs://host:80/d"}]}),
        "spec.training.data.sources[0].path",
    ),
    ("spec.training.evaluation.data", NO_PASSWORD.format("path")): Case(
        training(evaluation={"data": {"path": "s3://bucket/a?.csv"}}),
        training(evaluation={"data": {"path": "abfs://container@account/d?sv=1&sig=word"}}),
        "spec.training.evaluation.data.path",
    ),
    ("spec.training.data", NO_REVISION): Case(
        training(data={"name": "org/d", "revision": "v1"}),
        training(data={"path": "s3://bucket/d", "revision": "v1"}),
        "spec.training.data.revision",
    ),
    ("spec.training.data.sources[]", NO_REVISION): Case(
        training(data={"sources": [{"name": "org/d", "revision": "v1"}]}),
        training(data={"sources": [{"path": "/d", "revision": "v1"}]}),
        "spec.training.data.sources[0].revision",
    ),
    ("spec.training.evaluation.data", NO_REVISION): Case(
        training(evaluation={"data": {"name": "org/d", "revision": "v1"}}),
        training(evaluation={"data": {"path": "/d", "revision": "v1"}}),
        "spec.training.evaluation.data.revision",
    ),
    ("spec.training.data", "must have exactly one of path, name and sources"): Case(
        training(data={"sources": [{"path": "/d"}]}), training(data={"path": "/d", "name": "org/d"}), "spec.training.data"
    ),
    ("spec.training.data.sources[]", "must have exactly one of path and name"): Case(
        training(data={"sources": [{"name": "org/d"}]}), training(data={"sources": [{}]}), "spec.training.data.sources[0]"
    ),
    ("spec.training.evaluation.data", "must have exactly one of path and name"): Case(
        training(evaluation={"data": {"name": "org/d", "config": "c"}}),
        training(evaluation={"data": {"path": "/d", "name": "org/d"}}),
        "spec.training.evaluation.data",
    ),
    ("spec.env[]", "a name that begins with NCCL_ must be an NCCL variable such as NCCL_ALGO: upper-case letters, digits and '_'"): Case(
        job(env=[{"name": "NCCL_ALGO", "value": "Ring"}]), job(env=[{"name": "NCCL_algo", "value": "Ring"}]), "spec.env[0].name"
    ),
    ("spec.env[]", "may not have both value and valueFrom"): Case(env(value="1"), env(value="1", valueFrom=SECRET_KEY), "spec.env[0]"),
    (
        "spec.env[]",
        "a variable that the dynamic loader reads (LD_*, GLIBC_TUNABLES) takes a value, not valueFrom: only ranks get it, never the agent",
    ): Case(env(name="LD_PRELOAD", value="/a.so"), env(name="LD_PRELOAD", valueFrom=SECRET_KEY), "spec.env[0]"),
    ("spec.env[]", "name must not start with LOCKSTEP_: those variables are Lockstep's own"): Case(
        env(name="MY_LOCKSTEP_"), env(name="LOCKSTEP_X"), "spec.env[0].name"
    ),
    ("spec.env[].valueFrom", "must have exactly one of secretKeyRef, configMapKeyRef and fieldRef"): Case(
        env(valueFrom=SECRET_KEY), env(valueFrom=SECRET_KEY | {"fieldRef": {"fieldPath": "status.podIP"}}), "spec.env[0].valueFrom"
    ),
    ("spec", "the values of env may have at most 262144 bytes in all: put large ones into a ConfigMap that envFrom names"): Case(
        job(env=variables(32)), job(env=[*variables(32), {"name": "B", "value": "b"}]), "spec.env"
    ),
    ("spec.script", "args may have at most 131072 bytes in all: put them into a file that the script reads"): Case(
        job(script={"path": "a.py", "args": ["é" * 2048] * 32}), job(script={"path": "a.py", "args": [*["é" * 2048] * 32, "b"]}),
            "spec.script.args"
    ),
    ("spec.script", "must have exactly one of path, module and command"): Case(
        job(script={"module": "a.b"}), job(script={"path": "a.py", "command": ["a"]}), "spec.script"
    ),
    ("spec.script", "path names a Python file: for a shell script write command: [bash, FILE] instead"): Case(
        job(script={"path": "run.sh.py"}), job(script={"path": "run.sh"}), "spec.script.path"
    ),
    ("spec.script", "localRank is for path and module: write the option into command or args"): Case(
        job(script={"command": ["a"], "localRank": False}), job(script={"command": ["a"], "localRank": True}), "spec.script.localRank"
    ),
    (
        "spec.podTemplate",
        "annotations may have at most 250000 bytes in all: put them into a ConfigMap or a Secret that volumes names",
    ): Case(
        job(podTemplate={"annotations": notes(15)}), job(podTemplate={"annotations": notes(16)}), "spec.podTemplate.annotations"
    ),
    ("spec.envFrom[]", "must have exactly one of secretRef and configMapRef"): Case(
        job(envFrom=[{"secretRef": {"name": "s"}}]), job(envFrom=[{}]), "spec.envFrom[0]"
    ),
    ("spec.podTemplate", "labels must not use the prefixes lockstep.dev/ and app.kubernetes.io/: Lockstep sets those"): Case(
        job(podTemplate={"labels": {"team": "a"}}), job(podTemplate={"labels": {"lockstep.dev/job": "a"}}), "spec.podTemplate.labels"
    ),
    ("spec.podTemplate.labels", LABEL_KEYS): Case(
        job(podTemplate={"labels": {"example.com/a_b.C": "x"}}), job(podTemplate={"labels": {"a b": "x"}}), "spec.podTemplate.labels"
    ),
    ("spec.podTemplate.annotations", LABEL_KEYS): Case(
        job(podTemplate={"annotations": {f"{LONGEST_PREFIX}/a": "any text\n"}}),
        job(podTemplate={"annotations": {f"{TOO_LONG_PREFIX}/a": "x"}}),
        "spec.podTemplate.annotations",
    ),
    ("spec.podTemplate.nodeSelector", LABEL_KEYS): Case(
        job(podTemplate={"nodeSelector": {"rack": "1"}}), job(podTemplate={"nodeSelector": {"rack-": "1"}}), "spec.podTemplate.nodeSelector"
    ),
    **{
        ("spec.podTemplate.tolerations[]", message): Case(
            job(podTemplate={"tolerations": [accepted]}), job(podTemplate={"tolerations": [refused]}),
                f"spec.podTemplate.tolerations[0].{field}"
        )
        for message, accepted, refused, field in TOLERATIONS
    },
    ("spec.podTemplate.tolerations[].key", KEY_PREFIX): Case(
        job(podTemplate={"tolerations": [{"key": f"{LONGEST_PREFIX}/a", "operator": "Exists"}]}),
        job(podTemplate={"tolerations": [{"key": f"{TOO_LONG_PREFIX}/a", "operator": "Exists"}]}),
        "spec.podTemplate.tolerations[0].key",
    ),
    ("spec.podTemplate.volumes[]", "must have exactly one of configMap, secret, persistentVolumeClaim and emptyDir"): Case(
        volume(emptyDir={}), volume(emptyDir={}, configMap={"name": "c"}), "spec.podTemplate.volumes[0]"
    ),
    ("spec.podTemplate.volumes[]", "mountPath must not be one of Lockstep's own: /workspace, /datasets, /lockstep, /dev/shm, /tmp, and what"
                                   " begins with /etc/lockstep or /var/run/secrets"): Case(
        volume(emptyDir={}, mountPath="/workspace/models"),
        volume(emptyDir={}, mountPath="/etc/lockstep/run"),
        "spec.podTemplate.volumes[0].mountPath",
    ),
}  # fmt: skip

PROFILE_CASES = {
    ("spec.pod", "the values of env may have at most 131072 bytes in all: every pod of every job has them"): Case(
        profile(pod={"env": variables(16)}), profile(pod={"env": [*variables(16), {"name": "B", "value": "b"}]}), "spec.pod.env"
    ),
    ("spec", "nodes.gpuNodes must be empty or list at least gpus.defaultNodes nodes"): Case(
        profile(nodes={"gpuNodes": ["a", "b"]}), profile(nodes={"gpuNodes": ["a"]}), "spec.nodes.gpuNodes"
    ),
    ("spec", "security.ipcLock must be true when network.rdma.enabled is true and network.rdma.memlock is Capability: a NIC can't use"
             " memory that a pod can't lock"): Case(
        profile(**rdma(enabled=True), security={"ipcLock": True}), profile(**rdma(enabled=True)), "spec.security.ipcLock"
    ),
    ("spec", "security.ipcLock may not be true when network.rdma.memlock is Unlimited: the capability would not be used"): Case(
        profile(**rdma(enabled=True, memlock="Unlimited")),
        profile(**rdma(enabled=True, memlock="Unlimited"), security={"ipcLock": True}),
        "spec.security.ipcLock",
    ),
    ("spec.nodes.selector", LABEL_KEYS): Case(
        profile(nodes={"selector": {"nvidia.com/gpu.present": "true"}}), profile(nodes={"selector": {"a/b/c": "true"}}),
            "spec.nodes.selector"
    ),
    ("spec.nodes.rackLabel", KEY_PREFIX): Case(
        profile(nodes={"rackLabel": f"{LONGEST_PREFIX}/rack"}),
        profile(nodes={"rackLabel": f"{TOO_LONG_PREFIX}/rack"}),
        "spec.nodes.rackLabel",
    ),
    **{
        ("spec.pod.tolerations[]", message): Case(
            profile(pod={"tolerations": [accepted]}), profile(pod={"tolerations": [refused]}), f"spec.pod.tolerations[0].{field}"
        )
        for message, accepted, refused, field in TOLERATIONS
    },
    ("spec.pod.tolerations[].key", KEY_PREFIX): Case(
        profile(pod={"tolerations": [{"key": f"{LONGEST_PREFIX}/a", "operator": "Exists"}]}),
        profile(pod={"tolerations": [{"key": f"{TOO_LONG_PREFIX}/a", "operator": "Exists"}]}),
        "spec.pod.tolerations[0].key",
    ),
    ("spec.storage", "workspaceClaim and datasetsClaim may not be set when mode is PerPod: every pod has claims of its own"): Case(
        profile(storage={"mode": "Shared", "workspaceClaim": "w"}),
        profile(storage={"mode": "PerPod", "datasetsClaim": "d"}),
        "spec.storage.mode",
    ),
    ("spec.network", "mode may not be RDMA when rdma.enabled is false"): Case(
        profile(network={"mode": "TCP"}), profile(network={"mode": "RDMA"}), "spec.network.mode"
    ),
    ("spec.network.rdma.rails[]", "must have a network, a resource or both"): Case(
        profile(**rdma(enabled=True, memlock="Unlimited", rails=[{"resource": "rdma/a"}, {"network": "a"}, {"network": "a"}])),
        profile(**rdma(enabled=True, memlock="Unlimited", rails=[{"network": "a"}, {}])),
        "spec.network.rdma.rails[1].network",
    ),
    ("spec.network.rdma", "rails may not be set when enabled is false"): Case(
        profile(**rdma(enabled=True, memlock="Unlimited", rails=[{"network": "a"}])), profile(**rdma(rails=[{"network": "a"}])),
            "spec.network.rdma.rails"
    ),
    ("spec.resources", "limits.cpu must be greater than or equal to requests.cpu"): Case(
        profile(resources={"requests": {"cpu": "500m"}, "limits": {"cpu": "0.5"}}),
        profile(resources={"requests": {"cpu": "2"}, "limits": {"cpu": "1500m"}}),
        "spec.resources.limits.cpu",
    ),
    ("spec.resources", "limits.memory must be greater than or equal to requests.memory"): Case(
        profile(resources={"requests": {"memory": "1G"}, "limits": {"memory": "1Gi"}}),
        profile(resources={"requests": {"memory": "1Gi"}, "limits": {"memory": "1G"}}),
        "spec.resources.limits.memory",
    ),
}  # fmt: skip

CASES = {WrittenRule("TrainingJob", path, message): case for (path, message), case in JOB_CASES.items()} | {
    WrittenRule("TrainingCluster", path, message): case for (path, message), case in PROFILE_CASES.items()
}
"""The two paths "" and "spec" are schemas; a field path in a case is what the API server prints."""
