"""The Kubernetes objects of a job: frozen once for a start from zero pods, made from that alone while any pod is there."""

from __future__ import annotations

import hashlib
import hmac
import json
from base64 import b64encode
from collections.abc import Container
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from lockstep.api import names
from lockstep.plan.layers import Notice
from lockstep.plan.render.pod import app_labels, pod_template
from lockstep.plan.render.resolved import MADE_BY_OPERATOR, Refused, Resolved
from lockstep.plan.render.run import build_run, pod_placement, report_target
from lockstep.plan.render.storage import Claim, pod_claims, run_volume, shared_claims
from lockstep.plan.render.template import fill
from lockstep_gang.contract.run import ReportTarget, Run, parse_run, run_text

Object = dict[str, Any]

TEMPLATE_KEY = "template.json"
HASH_CHARACTERS = 10
FROZEN_BYTES_MAX = 1_000_000
"""Limit for a frozen run, since a ConfigMap holds 1 MiB, and for its pod template as a ControllerRevision has it, since etcd takes 1.5 MiB.
"""


_PLAIN_REPORT = report_target(names.REPORT_URL, MADE_BY_OPERATOR)


@dataclass(frozen=True)
class RenderContext:
    """Facts that only the operator knows. `key` is 64 hex characters; `owner_uid` is None where no TrainingJob object exists."""

    agent_image: str = MADE_BY_OPERATOR
    key: str = MADE_BY_OPERATOR
    owner_uid: str | None = MADE_BY_OPERATOR
    report: ReportTarget | None = _PLAIN_REPORT
    listening_since: float = 0.0
    """Seconds since the epoch at which this operator began to take reports; 0: it takes none."""
    key_secret: str = ""
    """Name of the Secret with `key`; empty: the one that a job without an operator has."""
    authority_made: float = 0.0
    """Seconds since the epoch at which the authority of `report` was made; 0: not known."""
    is_unverified: bool = False
    """The job's live node 0 has reported lately, and not with the key of `key_secret`."""
    run_key: str = ""
    """Key that signs frozen runs of this job; empty: they aren't signed."""
    clock_off: bool = False
    """The operator's clock and the API server's differ: what would be done because of a time that is over is not done."""
    build: str = MADE_BY_OPERATOR
    """`build_id` of the operator."""
    remembered: GangRun | None = None
    """The run of the pods that were there when this operator last looked."""


PLAIN = RenderContext()
"""Marked placeholders, for a reader of `lockstep render`."""


@dataclass(frozen=True)
class Frozen:
    """All that shapes the pods of a job from its start at zero pods until it is at zero again."""

    job: str
    namespace: str
    nodes: int
    run: str
    """The text of run.json."""
    template: str
    """JSON: the pod template, the claims of every pod and Kueue's queue, without the mention of this frozen run's name."""

    @cached_property
    def parsed(self) -> Run:
        """run.json's content."""
        return parse_run(self.run)

    @cached_property
    def key_secret(self) -> str:
        """Name of the Secret with the key of its agents."""
        volumes = json.loads(self.template)["pod"]["spec"]["volumes"]
        return next(str(volume["secret"]["secretName"]) for volume in volumes if volume["name"] == names.KEY_VOLUME)

    @cached_property
    def hash(self) -> str:
        """Tells frozen runs apart: the same inputs give the same."""
        return hashlib.sha256(f"{self.run}\0{self.template}".encode()).hexdigest()[:HASH_CHARACTERS]

    @property
    def name(self) -> str:
        """Name of the ConfigMap."""
        return names.run_name(self.job, self.hash)


@dataclass(frozen=True)
class GangRun:
    """A frozen run, and whether it is proven to be the operator's own."""

    run: Frozen
    proven: bool


def run_proof(frozen: Frozen, run_key: str) -> str:
    """Signature of a frozen run that only the operator can make, 64 hexadecimal digits."""
    text = json.dumps([frozen.namespace, frozen.job, frozen.run, frozen.template])
    return hmac.new(run_key.encode(), text.encode(), hashlib.sha256).hexdigest()


def differs_by_user(one: Frozen, other: Frozen) -> bool:
    """True if two runs of a job differ in what its spec and its cluster say, and not only in what the operator adds to them."""
    return _stated(one) != _stated(other)


def _stated(frozen: Frozen) -> tuple[Object, Object]:
    run, template = json.loads(frozen.run), json.loads(frozen.template)
    run = {key: value for key, value in run.items() if key not in ("build", "report")}
    spec = template["pod"]["spec"]
    for container in spec["initContainers"]:
        container.pop("image", None)
    for volume in spec["volumes"]:
        if volume["name"] == names.KEY_VOLUME:
            volume["secret"].pop("secretName", None)
    return run, template


def has_lost_key(frozen: Frozen, context: RenderContext) -> bool:
    """True if an operator with another master key named the Secret of this run. Runs of older versions don't show it."""
    return bool(context.key_secret) and frozen.key_secret not in (context.key_secret, names.key_secret_name(frozen.job))


def freeze(resolved: Resolved, context: RenderContext) -> Frozen:
    """Freeze what the job would run with if it started from zero pods now. Raises Refused when that is too large to keep."""
    reports = context.report is not None
    template: Object = {
        "pod": pod_template(resolved, context.agent_image, context.key_secret or names.key_secret_name(resolved.name), reports=reports),
        "claims": [claim_object(claim, None, app_labels(resolved)) for claim in pod_claims(resolved)],
    }
    if resolved.job.spec.queue_name is not None:
        template["queue"] = resolved.job.spec.queue_name
    run = run_text(replace(build_run(resolved, pod_placement(resolved, context.report)), build=context.build))
    frozen = Frozen(resolved.name, resolved.namespace, resolved.nodes, run, _text(template))
    size = max(len(frozen.run.encode()) + len(frozen.template.encode()), revision_bytes(template["pod"]))
    if size > FROZEN_BYTES_MAX:
        fields = "env, script.args, training and podTemplate of the job, and pod.env of the cluster,"
        message = f"{fields} make a run of {size} bytes, escapes included; at most {FROZEN_BYTES_MAX} are allowed: shorten them"
        raise Refused([Notice("RunTooLarge", message)])
    return frozen


def revision_bytes(pod: Object) -> int:
    """Bytes of the template in the StatefulSet's ControllerRevision: JSON as Kubernetes writes it, which escapes HTML. Without a revision
    there are no pods.
    """
    text = json.dumps(pod, separators=(",", ":"), ensure_ascii=False)
    return len(text.encode()) + 5 * sum(text.count(character) for character in "<>&")


def _text(template: Object) -> str:
    return json.dumps(template, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def thaw(config_map: Object) -> Frozen:
    """The frozen run that an observed ConfigMap `x-run-<hash>` holds."""
    metadata, data = config_map["metadata"], config_map["data"]
    run = parse_run(data[names.RUN_KEY])
    return Frozen(metadata["labels"][names.LABEL_JOB], metadata["namespace"], run.nodes, data[names.RUN_KEY], data[TEMPLATE_KEY])


def render(resolved: Resolved, context: RenderContext = PLAIN) -> list[Object]:
    """All objects of a job that starts now, in the order of their creation."""
    frozen = freeze(resolved, context)
    replicas = 0 if resolved.suspend else resolved.nodes
    return [*claims(resolved), *children(frozen, owner_uid=context.owner_uid, key=context.key, replicas=replicas)]


def claims(resolved: Resolved, existing: Container[str] = ()) -> list[Object]:
    """Claims to create when there is none of their name, and never to change, own or delete; without those that are `existing`."""
    # No job in the labels: the claim is the namespace's, whichever job came first.
    labels = {names.LABEL_NAME: names.APP, names.LABEL_MANAGED_BY: names.APP}
    return [claim_object(claim, resolved.namespace, labels) for claim in shared_claims(resolved) if claim.name not in existing]


def children(frozen: Frozen, *, owner_uid: str | None, key: str, replicas: int, proof: str = "") -> list[Object]:
    """The objects that the job owns, in the order of their creation: what pods mount comes before the pods.

    `proof`: `run_proof` of the run, where an operator writes it.
    """
    owners = [] if owner_uid is None else [job_reference(frozen.job, owner_uid)]

    def metadata(name: str, annotations: dict[str, str] | None = None) -> Object:
        labels = names.job_labels(frozen.job)
        return {"name": name, "namespace": frozen.namespace, "labels": labels, "annotations": annotations, "ownerReferences": owners}

    run = metadata(frozen.name, {names.ANNOTATION_RUN_PROOF: proof} if proof else None)
    return [
        fill("secret", metadata=metadata(frozen.key_secret), key_base64=b64encode(key.encode()).decode()),
        fill("configmap", metadata=run, data={names.RUN_KEY: frozen.run, TEMPLATE_KEY: frozen.template}),
        fill("networkpolicy", metadata=metadata(frozen.job), job=frozen.job),
        fill("service", metadata=metadata(names.service_name(frozen.job)), job=frozen.job),
        _stateful_set(frozen, metadata(frozen.job, {names.ANNOTATION_RUN_HASH: frozen.hash}), replicas),
    ]


def job_reference(job: str, uid: str) -> Object:
    """Owner reference of everything that belongs to a TrainingJob."""
    return {
        "apiVersion": names.API_VERSION, "kind": "TrainingJob", "name": job, "uid": uid, "controller": True, "blockOwnerDeletion": False,
    }  # fmt: skip


def _stateful_set(frozen: Frozen, metadata: Object, replicas: int) -> Object:
    template = json.loads(frozen.template)
    pod = template["pod"]
    pod["metadata"]["annotations"] = {**pod["metadata"].get("annotations", {}), **metadata["annotations"]}
    pod["spec"]["volumes"].append(run_volume(frozen.name))
    if "queue" in template:
        metadata["labels"] |= {names.LABEL_QUEUE: template["queue"]}
    service = names.service_name(frozen.job)
    stateful_set = fill("statefulset", metadata=metadata, job=frozen.job, replicas=replicas, service=service)
    of_every_pod = {"volumeClaimTemplates": template["claims"]} if template["claims"] else {}
    stateful_set["spec"] |= {"template": pod, **of_every_pod}
    return stateful_set


def claim_object(claim: Claim, namespace: str | None, labels: dict[str, str]) -> Object:
    """Return a claim to create; without a namespace, one of a StatefulSet's volumeClaimTemplates."""
    return fill("claim", **asdict(claim), namespace=namespace, labels=labels)
