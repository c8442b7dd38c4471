"""Whose report is it? A pod can speak only for its own job, and only while it is that job's live node 0."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from lockstep.api.names import KEY_VOLUME, LABEL_JOB, REPORT_AUDIENCE, pod_name
from lockstep.api.objects import Object
from lockstep.kube.cluster import Cluster
from lockstep.kube.kinds import path_of
from lockstep.plan.observed import Observed, owner_uid
from lockstep.platforms.operator.memory.inventory import Inventory
from lockstep.platforms.operator.secrets import job_key, key_secret
from lockstep_gang.contract.proof import is_report_signature, parse_key
from lockstep_gang.contract.report import JOB_HEADER, SIGNATURE_HEADER, Report
from lockstep_gang.contract.run import JobIdentity

POD_NAME_CLAIM = "authentication.kubernetes.io/pod-name"
POD_UID_CLAIM = "authentication.kubernetes.io/pod-uid"
UNAUTHENTICATED, FORBIDDEN = 401, 403


class Refusal(Exception):
    """Raised if a report is not taken. `status` is the reply's; the message never says anything that the sender doesn't know already.

    `again_seconds`: when the same may be sent again, if that is known.
    """

    def __init__(self, status: int, message: str, again_seconds: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {} if again_seconds is None else {"Retry-After": str(again_seconds)}


@dataclass(frozen=True)
class Bearer:
    """Bearer of a token."""

    namespace: str
    pod: str
    pod_uid: str


ReviewToken = Callable[[str], Awaitable[Object]]
"""The status of a TokenReview."""


def token_reviewer(cluster: Cluster, *audiences: str) -> ReviewToken:
    """Return a function that asks the API server about tokens for these audiences; without any, about those for the API server itself."""

    async def review(token: str) -> Object:
        spec = {"token": token, "audiences": audiences}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        reply = await cluster.request("POST", path_of("TokenReview"), body)
        status: Object = reply["status"]
        return status

    return review


def check_signature(master: bytes, job: JobIdentity, body: bytes, signature: str) -> None:
    """Over the raw bytes, before anything parses them: nobody without a job's key costs the operator more than one hash, or a question to
    the API server.

    Raises Refusal.
    """
    if not is_report_signature(parse_key(job_key(master, job.uid)), body, signature):
        raise Refusal(UNAUTHENTICATED, f"{SIGNATURE_HEADER} is missing or isn't this job's over this body")


def check_job(claimed: JobIdentity, report: Report) -> None:
    """A job's key signs for that job only. Raises Refusal."""
    if report.job != claimed or report.pod != pod_name(claimed.name, 0):
        raise Refusal(FORBIDDEN, f"report.job isn't the job that {JOB_HEADER} names, or report.pod not its node 0")


def bearer_token(authorization: str) -> str:
    """Return the token of an Authorization header. Raises Refusal."""
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Refusal(UNAUTHENTICATED, "Authorization must be Bearer and a service account's token")
    return token.strip()


async def bearer_of(review: ReviewToken, authorization: str) -> Bearer:
    """The pod that holds the token. Raises Refusal."""
    status = await review(bearer_token(authorization))
    if not status.get("authenticated") or REPORT_AUDIENCE not in status.get("audiences", []):
        raise Refusal(UNAUTHENTICATED, f"the token isn't valid for audience {REPORT_AUDIENCE}")
    return _bearer(status.get("user", {}))


def _bearer(user: Any) -> Bearer:
    extra = user.get("extra") or {}
    parts = str(user.get("username", "")).split(":")
    pod, uid = extra.get(POD_NAME_CLAIM, []), extra.get(POD_UID_CLAIM, [])
    if parts[:2] != ["system", "serviceaccount"] or len(parts) != 4 or len(pod) != 1 or len(uid) != 1:
        raise Refusal(FORBIDDEN, "the token isn't bound to a pod")
    return Bearer(parts[2], pod[0], uid[0])


def has_other_key(observed: Observed, master: bytes) -> bool:
    """Return True if the pods mount another Secret than this operator makes for the job: it was made with a key that was lost, or by an
    older version.

    Then nothing but the token can prove who sends. Whoever can change what the StatefulSet mounts can make pods, and so has a node 0
    anyway.
    """
    volumes = ((observed.stateful_set or {}).get("spec", {}).get("template", {}).get("spec", {}).get("volumes")) or []
    names = [volume.get("secret", {}).get("secretName") for volume in volumes if volume.get("name") == KEY_VOLUME]
    return bool(names) and names != [key_secret(master, observed.name, observed.uid)]


def check_node_zero(inventory: Inventory, bearer: Bearer, job: JobIdentity) -> Observed:
    """Return what is observed of the job if the bearer is the pod x-0 that lives now, made by the StatefulSet of this very job. Raises
    Refusal.
    """
    observed = inventory.observed((job.namespace, job.name))
    if observed is None or observed.uid != job.uid:
        raise Refusal(FORBIDDEN, f"there is no job {job.namespace}/{job.name} of that uid")
    if (bearer.namespace, bearer.pod) != (job.namespace, pod_name(job.name, 0)):
        raise Refusal(FORBIDDEN, f"only pod {pod_name(job.name, 0)} may report for job {job.namespace}/{job.name}")
    pod, stateful_set = inventory.item("Pod", (bearer.namespace, bearer.pod)), observed.stateful_set
    if pod is None or pod["metadata"]["uid"] != bearer.pod_uid or pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        raise Refusal(FORBIDDEN, f"the pod that holds this token is not the live {bearer.pod}")
    made_here = stateful_set is not None and owner_uid(pod) == stateful_set["metadata"]["uid"] and owner_uid(stateful_set) == job.uid
    if not made_here or pod["metadata"].get("labels", {}).get(LABEL_JOB) != job.name:
        raise Refusal(FORBIDDEN, f"pod {bearer.pod} was not made for job {job.namespace}/{job.name}")
    return observed
