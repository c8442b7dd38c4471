"""Keeper of a run without an operator: a small pod of a Job, with rights on this run alone, lets the nodes go at its end, whoever follows
it.

Containers of a StatefulSet are always started again, so that without it the pods of a run that is over would hold their nodes for ever.
"""

from __future__ import annotations

import json

from lockstep.api import names
from lockstep.api.objects import Object
from lockstep.kube.kinds import path_of
from lockstep.plan.render.readerpod import beside_trainer
from lockstep.platforms.inpod import keeper as program
from lockstep.platforms.inpod import source_of
from lockstep_spec.exits import CONFIGURATION, DONE, FAILED, SAVED

VERDICTS = (DONE, FAILED, SAVED, CONFIGURATION)
"""Exit codes of an agent that has nothing left to do; any other one is restarted by the kubelet."""
KEEPER = f"{names.APP}-keeper"
SERVER = "https://kubernetes.default.svc"
RESOURCES: Object = {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"cpu": "200m", "memory": "128Mi"}}
BACKOFF_LIMIT = 1000
"""Restarts of its pod, which may be drained or evicted as any other."""


def keeper_name(job: str) -> str:
    return f"{job}-keeper"


def exit_code(pod: Object | None, *, replaced: bool = True) -> int | None:
    """Return the exit code of a run by its pod 0, as its keeper sees it; None while it goes on. `replaced`: another pod follows one that
    saved because it was evicted or drained.
    """
    return None if pod is None else program.verdict(pod, list(VERDICTS), SAVED if replaced else None)


def keeper(stateful_set: Object, owner: Object) -> list[Object]:
    """Objects of the keeper, in the order of their creation. `stateful_set`: as it was created; `owner`: the ownerReference of all of
    them.
    """
    job, namespace = stateful_set["metadata"]["name"], stateful_set["metadata"]["namespace"]
    name, labels = keeper_name(job), {names.LABEL_NAME: KEEPER}
    metadata = {"name": name, "namespace": namespace, "labels": labels, "ownerReferences": [owner]}
    template = stateful_set["spec"]["template"]["spec"]
    secrets = template.get("imagePullSecrets") or []
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "resourceNames": [names.pod_name(job, 0)], "verbs": ["get"]},
        {"apiGroups": ["apps"], "resources": ["statefulsets/scale"], "resourceNames": [job], "verbs": ["get", "patch"]},
    ]
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    pod = {"metadata": {"labels": labels}, "spec": _pod(stateful_set, template)}
    spec = {"backoffLimit": BACKOFF_LIMIT, "ttlSecondsAfterFinished": 0, "template": pod}
    rbac = "rbac.authorization.k8s.io"
    return [
        {
            "apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata,
            "automountServiceAccountToken": False, "imagePullSecrets": secrets,
        },
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{rbac}/v1", "kind": "RoleBinding", "metadata": metadata, "subjects": [subject],
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": name},
        },
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec},
    ]  # fmt: skip


def _pod(stateful_set: Object, template: Object) -> Object:
    job, namespace = stateful_set["metadata"]["name"], stateful_set["metadata"]["namespace"]
    arguments = {
        "server": SERVER, "uid": stateful_set["metadata"]["uid"], "verdicts": list(VERDICTS), "saved": SAVED,
        "pod_path": path_of("Pod", namespace, names.pod_name(job, 0)), "scale_path": path_of("StatefulSet", namespace, job, "scale"),
    }  # fmt: skip
    volumes = [
        volume for volume in template.get("volumes") or [] if (volume.get("persistentVolumeClaim") or {}).get("readOnly")
    ]  # Python may be there
    container = {
        "name": "keeper",
        "command": ["python3", "-I", "-c", source_of(program).decode(), json.dumps(arguments)],
        "resources": RESOURCES,
        **beside_trainer(template, volumes),
    }
    return {
        "containers": [container],
        "volumes": volumes,
        "serviceAccountName": keeper_name(job),
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": 1,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "tolerations": template.get("tolerations") or [],
    }
