"""Acceptance of a job: its spec is read, its cluster chosen, both are resolved and frozen. The first obstacle is reported."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from pydantic import ValidationError

from lockstep.api.cluster import TrainingCluster
from lockstep.api.files.problems import explain
from lockstep.api.job import TrainingJob
from lockstep.api.names import ANNOTATION_DEFAULT_CLUSTER
from lockstep.api.objects import Object, claim_names
from lockstep.api.status import ClusterInUse
from lockstep.api.statuspart import unchecked
from lockstep.plan.layers import Notice
from lockstep.plan.observed import UNREADABLE, Observed, is_terminating, start_anew
from lockstep.plan.reasons import Reason
from lockstep.plan.render.objects import HASH_CHARACTERS, Frozen, RenderContext, freeze
from lockstep.plan.render.resolve import DEPRECATED, refuse_missing_gpus, resolve, trainer_image
from lockstep.plan.render.resolved import PlatformDefaults, Refused, Resolved
from lockstep.plan.render.storage import shared_claims
from lockstep_spec.words import listed

REMEMBERED_JOBS, REMEMBERED_CLUSTERS = 32, 8
REMEMBERED_CHARACTERS = 16 << 10
"""The most that a remembered job may have; most have 1 KB. Larger ones are read each time, so that they hold no memory."""


@dataclass(frozen=True)
class Accepted:
    """A job with its cluster, and the run that it would start with now."""

    resolved: Resolved
    frozen: Frozen

    @property
    def deprecated(self) -> str:
        """Sentences about what the job has and should not have any more."""
        return "; ".join(one.message for one in self.resolved.warnings if one.reason == DEPRECATED)

    @cached_property
    def cluster(self) -> ClusterInUse:
        """status.cluster of a job that starts with it."""
        profile = self.resolved.profile
        text = json.dumps(profile.spec.to_dict(), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:HASH_CHARACTERS]
        return unchecked(ClusterInUse, name=profile.metadata.name, hash=digest, transport=str(self.resolved.transport))


def accept(observed: Observed, context: RenderContext) -> Accepted | Notice:
    """The job as it can start now, or why it can't."""
    if UNREADABLE in observed.job:
        return Notice(Reason.INVALID_SPEC, f"the job can't be used: {observed.job[UNREADABLE]}")
    text = _stated(observed.job)
    is_small = len(text) <= REMEMBERED_CHARACTERS
    job = (_job if is_small else _job.__wrapped__)(text)
    if isinstance(job, Notice):
        return job
    profile = _profile(observed, job.spec.cluster)
    if isinstance(profile, Notice):
        return profile
    cluster, excluded = _stated(profile), tuple(node["name"] for node in observed.status.get("excludedNodes") or [])
    frozen_by = RenderContext(  # no more of it is part of a frozen run
        context.agent_image, key_secret=context.key_secret, report=context.report, build=context.build
    )
    return _remembered(text, cluster, excluded, frozen_by) if is_small else _accepted(job, _cluster(cluster), excluded, frozen_by)


def _stated(item: Object) -> str:
    """A job or a cluster as somebody wrote it, as JSON."""
    metadata = {key: value for key, value in item["metadata"].items() if key != "resourceVersion"}
    return json.dumps({key: value for key, value in item.items() if key not in ("status", "metadata")} | {"metadata": metadata})


@lru_cache(REMEMBERED_JOBS)
def _job(text: str) -> TrainingJob | Notice:
    try:
        return TrainingJob.model_validate(json.loads(text))
    except ValidationError as error:
        return Notice(Reason.INVALID_SPEC, f"the job can't be used: {_first_problem(error)}")


@lru_cache(REMEMBERED_CLUSTERS)
def _cluster(text: str) -> TrainingCluster | Notice:
    cluster = json.loads(text)
    try:
        return TrainingCluster.model_validate(cluster)
    except ValidationError as error:
        return _invalid_cluster(cluster, _first_problem(error))


@lru_cache(REMEMBERED_JOBS)
def _remembered(job_text: str, cluster_text: str, excluded: tuple[str, ...], context: RenderContext) -> Accepted | Notice:
    """Each event of each pod of a job is a look at it, and all of them find the same."""
    return _accepted(_job(job_text), _cluster(cluster_text), excluded, context)


def _accepted(
    job: TrainingJob | Notice, profile: TrainingCluster | Notice, excluded: tuple[str, ...], context: RenderContext
) -> Accepted | Notice:
    if isinstance(job, Notice):
        return job
    if isinstance(profile, Notice):
        return profile
    try:
        image = trainer_image(context.agent_image)
        resolved = resolve(job, profile, PlatformDefaults(excluded_nodes=excluded, image=image))
        refuse_missing_gpus(resolved)
        return Accepted(resolved, freeze(resolved, context))
    except Refused as refused:
        return Notice(refused.refusals[0].reason, str(refused))


def missing_service_account(observed: Observed, accepted: Accepted) -> Notice | None:
    """Pods are not even asked for without it: the StatefulSet would retry ever more slowly and start late when it is made."""
    name = accepted.resolved.profile.spec.security.service_account
    if name in observed.service_accounts:
        return None
    text = no_service_account(name, observed.namespace)
    return Notice(Reason.SERVICE_ACCOUNT_NOT_FOUND, f"{text} or run lockstep deploy CLUSTER for that namespace")


def no_service_account(name: str, namespace: str) -> str:
    """Return the sentence that a namespace lacks it, with the command that makes it."""
    return (
        f"service account {name} does not exist in namespace {namespace}: create it (kubectl create serviceaccount {name} -n {namespace})"
    )


def service_account_gone(observed: Observed, accepted: Accepted) -> Notice | None:
    """While pods are there, whose tokens are of the one that was deleted: a new one of its name doesn't make them valid."""
    missing = missing_service_account(observed, accepted)
    if missing is None:
        return None
    return Notice(
        missing.reason,
        f"{missing.message}; pods that are there can't report any more, and new ones can't start: after that, {start_anew(observed)}",
    )


def claim_going(observed: Observed, accepted: Accepted | None) -> Notice | None:
    """A claim of the job that somebody deletes. It stays while a pod mounts it, and can't be had back."""
    used = {name for pod in observed.pods for name in claim_names(pod)}
    names = used or ({claim.name for claim in shared_claims(accepted.resolved)} if accepted is not None else set())
    going = sorted(name for name in names if is_terminating(observed.claims.get(name, {"metadata": {}})))
    if not going:
        return None
    text = f"claim {going[0]} is being deleted"
    if not used:
        return Notice(Reason.CLAIM_DELETED, f"{text}: the job starts on a new, empty claim once it is gone")
    copy = f"`lockstep cp {observed.name}:runs/{observed.name} . -n {observed.namespace}`"
    return Notice(
        Reason.CLAIM_DELETED,
        f"{text}, and its data is lost once no pod mounts it: copy what you need while the job runs ({copy})",
    )


def _profile(observed: Observed, name: str | None) -> Object | Notice:
    profile = _named(observed, name) if name else _default(observed)
    if not isinstance(profile, Notice) and UNREADABLE in profile:
        return _invalid_cluster(profile, profile[UNREADABLE])
    return profile


def _invalid_cluster(cluster: Object, problem: str) -> Notice:
    name = cluster["metadata"]["name"]
    helps = f"correct its file and send it, the job starts by itself then (lockstep deploy {name})"
    return Notice(Reason.INVALID_CLUSTER, f"TrainingCluster {name} can't be used: {problem}; {helps}")


def _named(observed: Observed, name: str) -> Object | Notice:
    profile = next((p for p in observed.profiles if p["metadata"]["name"] == name), None)
    helps = f"send it from its file, or create another job for another cluster (lockstep deploy {name})"
    text = f"spec.cluster is {name}, but there is no such TrainingCluster; {_available(observed)}: {helps}"
    return profile or Notice(Reason.CLUSTER_NOT_FOUND, text)


def _default(observed: Observed) -> Object | Notice:
    mark = ANNOTATION_DEFAULT_CLUSTER
    defaults = [p for p in observed.profiles if p["metadata"].get("annotations", {}).get(mark) == "true"]
    if not defaults:
        names = _names(observed.profiles)
        helps = f"make one the default (kubectl annotate tc {names[0]} {mark}=true)" if names else "send one from its file"
        text = f"spec.cluster is not set and no TrainingCluster is annotated {mark}: true; {_available(observed)}: {helps}"
        return Notice(Reason.NO_DEFAULT_CLUSTER, f"{text}, or set spec.cluster")
    if len(defaults) > 1:
        names = _names(defaults)
        text = f"spec.cluster is not set and several TrainingClusters are annotated {mark}: true ({', '.join(names)})"
        return Notice(Reason.SEVERAL_DEFAULT_CLUSTERS, f"{text}: leave it on one (kubectl annotate tc {names[-1]} {mark}-)")
    return defaults[0]


def _available(observed: Observed) -> str:
    names = _names(observed.profiles)
    return f"the cluster has {listed(names)}" if names else "there is none at all"


def _names(profiles: Iterable[Object]) -> list[str]:
    return sorted(str(profile["metadata"]["name"]) for profile in profiles)


def _first_problem(error: ValidationError) -> str:
    detail = error.errors()[0]
    path = ".".join(str(part) for part in detail["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{path}: {explain(detail)}{more}"
