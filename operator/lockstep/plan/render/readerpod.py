"""A pod that sees a job's files when no pod of the job does: the job's claims and image, no GPU, few rights, an end of its own (pure).

Before the job's first start, where each pod has volumes of its own, it asks for what the job's pods ask for: a volume that binds late
follows it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from lockstep.api import names
from lockstep.api.objects import Object, claim_names, restricted_context

CONTAINER = "reader"
READER = f"{names.APP}-reader"
LABEL_READER_OF = f"{names.GROUP}/reader-of"
"""Not the job's own label: the operator and the job's NetworkPolicy would take the pod for one of the job's."""
RESOURCES: Object = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"cpu": "2", "memory": "2Gi"}}
"""Resources where no others are asked for. Limits, too: a quota on limits refuses a pod without."""
# A program that is the first of its container hears no signal that it doesn't ask for.
_WAIT = ["python3", "-c", "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit()); signal.pause()"]
_OF_THE_AGENT = (names.AGENT_VOLUME, names.KEY_VOLUME, names.RUN_VOLUME, names.TOKEN_VOLUME)
_FILES = ("persistentVolumeClaim", "emptyDir")


def pod_claims_of(stateful_set: Object, node: int) -> dict[str, str]:
    """Map of volume to claim, for the volumes that every pod has for itself; empty where all pods share theirs."""
    job = stateful_set["metadata"]["name"]
    templates = stateful_set["spec"].get("volumeClaimTemplates") or []
    return {template["metadata"]["name"]: f"{template['metadata']['name']}-{names.pod_name(job, node)}" for template in templates}


def is_shared(stateful_set: Object) -> bool:
    """Return True if all pods of the job share their volumes."""
    return not pod_claims_of(stateful_set, 0)


def reader_pod(stateful_set: Object, node: int, suffix: str, seconds: int, resources: Object | None = None) -> Object:
    """The pod that sees what pod `node` of the job would. It is stopped after `seconds`, whoever made it, and goes when the job's objects
    do.
    """
    job, template = stateful_set["metadata"]["name"], stateful_set["spec"]["template"]["spec"]
    volumes = _volumes(stateful_set, node)
    is_first = makes_volumes(stateful_set)  # where volumes bind late, this pod chooses the node of the job's, which has what that asks for
    metadata = {
        "name": f"{job}-reader-{suffix}",
        "namespace": stateful_set["metadata"]["namespace"],
        "labels": {names.LABEL_NAME: READER, LABEL_READER_OF: job},
        "ownerReferences": _owners(stateful_set),
    }
    container = {
        "name": CONTAINER,
        "command": _WAIT,
        "workingDir": names.WORKSPACE,
        **beside_trainer(template, volumes),
        "resources": resources or (_trainer_of(template)["resources"] if is_first else RESOURCES),
    }
    spec = {
        "containers": [container],
        "volumes": volumes,
        "securityContext": template.get("securityContext") or {},
        "tolerations": template.get("tolerations") or [],
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "activeDeadlineSeconds": seconds,
        "terminationGracePeriodSeconds": 1,
    }
    optional = {key: template[key] for key in ("serviceAccountName", "imagePullSecrets", "priorityClassName") if template.get(key)}
    if is_first:
        apart = json.dumps(template.get("affinity") or {}).replace(names.LABEL_JOB, LABEL_READER_OF)
        optional |= {"affinity": json.loads(apart), "nodeSelector": template.get("nodeSelector") or {}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec | optional}


def makes_volumes(stateful_set: Object) -> bool:
    """Return True if every pod has volumes of its own, and the job has never started."""
    return not is_shared(stateful_set) and "uid" not in stateful_set["metadata"]


def with_secrets(pod: Object, stateful_set: Object) -> Object:
    """The pod with those of the job's variables that come from Secrets and ConfigMaps: tokens and credentials, which a program in it needs
    to fetch.
    """
    trainer = _trainer_of(stateful_set["spec"]["template"]["spec"])
    (container,) = pod["spec"]["containers"]
    referred = [v for v in trainer.get("env") or [] if {"secretKeyRef", "configMapKeyRef"} & (v.get("valueFrom") or {}).keys()]
    more = {"envFrom": trainer["envFrom"]} if trainer.get("envFrom") else {}
    return {**pod, "spec": {**pod["spec"], "containers": [{**container, "env": [*container["env"], *referred], **more}]}}


def _owners(stateful_set: Object) -> list[Object]:
    """Owner references: the StatefulSet, if it exists already."""
    name, uid = stateful_set["metadata"]["name"], stateful_set["metadata"].get("uid")
    owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name, "uid": uid, "blockOwnerDeletion": False}
    return [owner] if uid is not None else []


def _volumes(stateful_set: Object, node: int) -> list[Object]:
    shown = [
        volume
        for volume in stateful_set["spec"]["template"]["spec"].get("volumes") or []
        if volume["name"] not in _OF_THE_AGENT and any(kind in volume for kind in _FILES)
    ]
    own = pod_claims_of(stateful_set, node)
    return shown + [{"name": name, "persistentVolumeClaim": {"claimName": claim}} for name, claim in own.items()]


def _trainer_of(template: Object) -> Object:
    """Return the container of the ranks. `template`: the spec of a job's pods."""
    trainer: Object = next(container for container in template["containers"] if container["name"] == names.CONTAINER)
    return trainer


def beside_trainer(template: Object, volumes: Sequence[Object]) -> Object:
    """Return parts of a container with the image of a job's ranks and those of their variables that are no Secrets, which mounts these
    volumes as they do. It has few rights, also where the job's own pods need more.
    """
    trainer, shown = _trainer_of(template), {volume["name"] for volume in volumes}
    return {
        "image": trainer["image"],
        "env": [variable for variable in trainer.get("env") or [] if "value" in variable],
        "volumeMounts": [mount for mount in trainer.get("volumeMounts") or [] if mount["name"] in shown],
        "securityContext": restricted_context((template.get("securityContext") or {}).get("fsGroup")),
    }


def mounted_claims(pod: Object, container: str, *, writing: bool) -> list[str]:
    """Paths where the container mounts claims: what is outside of them goes with the pod."""
    claims = {v["name"]: v["persistentVolumeClaim"].get("readOnly") for v in pod["spec"]["volumes"] if "persistentVolumeClaim" in v}
    mounts = next(c for c in pod["spec"]["containers"] if c["name"] == container)["volumeMounts"]
    return [m["mountPath"] for m in mounts if m["name"] in claims and not (writing and (m.get("readOnly") or claims[m["name"]]))]


def missing_claim(pod: Object, claims: Mapping[str, Object], own: Mapping[str, str]) -> str | None:
    """Reason why the pod's claims can't be mounted, in one sentence; None when they can.

    A pod's own claim that is not bound is left alone: where volumes bind late, this pod would choose the node for it, and then the job's
    pod, which needs GPUs, could never start there.
    """
    for name in claim_names(pod):
        claim = claims.get(name)
        if claim is None:
            return f"claim {name} does not exist: the job's pods have not run yet, so there are no files of theirs"
        if name in own.values() and claim.get("status", {}).get("phase") != "Bound":
            return f"claim {name} is bound to no volume yet: it gets one when the job's pod first runs"
    return None
