"""Whether a job can start: its spec is read, its profile chosen, both resolved and frozen. The first thing in the way is told."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from pydantic import ValidationError

from lockstep.api.job import TrainingJob
from lockstep.api.names import ANNOTATION_DEFAULT_PROFILE
from lockstep.api.profile import ClusterProfile
from lockstep.plan.excluded import excluded_names
from lockstep.plan.layers import Notice
from lockstep.plan.objects import Frozen, RenderContext, freeze
from lockstep.plan.observed import UNREADABLE, Object, Observed
from lockstep.plan.reasons import Reason
from lockstep.plan.resolve import PlatformDefaults, Refused, Resolved, resolve

HASH_CHARACTERS = 10
LISTED_PROFILES = 8


@dataclass(frozen=True)
class Accepted:
    """A job with its profile, and the run that it would start with now."""

    resolved: Resolved
    frozen: Frozen

    @property
    def profile(self) -> Object:
        """For status.profile."""
        profile = self.resolved.profile
        text = json.dumps(profile.spec.to_dict(), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:HASH_CHARACTERS]
        return {"name": profile.metadata.name, "hash": digest, "transport": str(self.resolved.transport)}


def accept(observed: Observed, context: RenderContext) -> Accepted | Notice:
    """The job as it can start now, or why it can't."""
    if UNREADABLE in observed.job:
        return Notice(Reason.INVALID_SPEC, f"the job can't be used: {observed.job[UNREADABLE]}")
    try:
        job = TrainingJob.model_validate(observed.job)
    except ValidationError as error:
        return Notice(Reason.INVALID_SPEC, _first_problem(error, "the job"))
    profile = _profile(observed, job.spec.cluster_profile_name)
    if isinstance(profile, Notice):
        return profile
    try:
        resolved = resolve(job, profile, PlatformDefaults(excluded_nodes=excluded_names(observed)))
        return Accepted(resolved, freeze(resolved, context))
    except Refused as refused:
        return Notice(refused.refusals[0].reason, str(refused))


def missing_service_account(observed: Observed, accepted: Accepted) -> Notice | None:
    """Pods are not even asked for without it: the StatefulSet would retry ever more slowly and start late when it is made."""
    name = accepted.resolved.profile.spec.security.service_account
    if name in observed.service_accounts:
        return None
    text = f"service account {name} does not exist in namespace {observed.namespace}: make it (kubectl create serviceaccount {name} -n {observed.namespace})"
    return Notice(Reason.SERVICE_ACCOUNT_NOT_FOUND, f"{text} or run deploy-cluster for that namespace")


def _profile(observed: Observed, name: str | None) -> ClusterProfile | Notice:
    found = _named(observed, name) if name else _default(observed)
    if isinstance(found, Notice):
        return found
    if UNREADABLE in found:
        return Notice(Reason.INVALID_PROFILE, f"ClusterProfile {found['metadata']['name']} can't be used: {found[UNREADABLE]}")
    try:
        return ClusterProfile.model_validate(found)
    except ValidationError as error:
        problem = _first_problem(error, f"ClusterProfile {found['metadata']['name']}")
        return Notice(Reason.INVALID_PROFILE, f"{problem}; correct the profile, the job starts by itself then")


def _named(observed: Observed, name: str) -> Object | Notice:
    found = next((p for p in observed.profiles if p["metadata"]["name"] == name), None)
    text = f"spec.clusterProfileName is {name}, but there is no such ClusterProfile; {_known(observed)}: apply it"
    return found or Notice(Reason.PROFILE_NOT_FOUND, text)


def _default(observed: Observed) -> Object | Notice:
    mark = ANNOTATION_DEFAULT_PROFILE
    found = [p for p in observed.profiles if p["metadata"].get("annotations", {}).get(mark) == "true"]
    if not found:
        text = f"spec.clusterProfileName is not set and no ClusterProfile is annotated {mark}: true; {_known(observed)}: annotate one"
        return Notice(Reason.NO_DEFAULT_PROFILE, text)
    if len(found) > 1:
        names = ", ".join(sorted(p["metadata"]["name"] for p in found))
        text = f"spec.clusterProfileName is not set and several ClusterProfiles are annotated {mark}: true ({names}): leave it on one"
        return Notice(Reason.SEVERAL_DEFAULT_PROFILES, text)
    return found[0]


def _known(observed: Observed) -> str:
    names = sorted(p["metadata"]["name"] for p in observed.profiles)
    return f"known are {', '.join(names[:LISTED_PROFILES])}" if names else "there is none at all"


def _first_problem(error: ValidationError, what: str) -> str:
    detail = error.errors()[0]
    path = ".".join(str(part) for part in detail["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{what} can't be used: {path}: {detail['msg']}{more}"
