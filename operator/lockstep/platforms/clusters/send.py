"""Sends to a cluster what the rights of a person allow, and finds out how the rest is there."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass

from lockstep.api.names import APP, GROUP, LABEL_JOB, LABEL_MANAGED_BY, LABEL_NAME, OPERATOR_NAME, OPERATOR_NAMESPACE
from lockstep.api.objects import CLAIM, DEFINITION, Object, has_ended, is_true
from lockstep.kube.cluster import FORBIDDEN, NOT_FOUND, ApiError, Cluster, tolerated
from lockstep.kube.kinds import KINDS
from lockstep.plan.ahead.live import next_start
from lockstep.plan.cluster.facts import Sight
from lockstep.plan.cluster.scope import (
    ADMISSION,
    PROFILE_CONFIG,
    PROFILE_KEY,
    AccountStanding,
    Scope,
    image_of,
    is_outdated,
    needed_for_operator,
    outdated,
    scope_of,
)
from lockstep.plan.diff import Change, changes
from lockstep.plan.layers import Notice
from lockstep.plan.ship.deploy import CLUSTER, ONLY_CREATED, Left, State, called, difference, loss_lines, state_of, unsent
from lockstep.platforms.clusters.install import FIELD_MANAGER, send_one, until_established
from lockstep.platforms.clusters.listings import forbidden, is_there, list_kind, read_object, sight_of_jobs

Say = Callable[[str], None]
CREATE = ("create",)
APPLY = ("create", "patch")
OF_JOBS = {"labelSelector": f"{LABEL_MANAGED_BY}={APP},{LABEL_JOB}"}
LOOKS = 5  # at most, at an object that others write meanwhile


@dataclass(frozen=True)
class Sent:
    """Objects that are on the cluster now as they were rendered, and those that are left."""

    objects: tuple[Object, ...]
    left: tuple[Left, ...]
    notes: tuple[str, ...] = ()
    """Sentences about what was left out and isn't missed: the operator works without the bounds of its account."""

    @property
    def is_complete(self) -> bool:
        """True if nothing is left, as far as this person may see."""
        return all(part.state is State.UNSEEN for part in unsent(self.left))

    def has(self, kind: str) -> bool:
        return any(item["kind"] == kind for item in self.objects)


async def send_permitted(cluster: Cluster, objects: list[Object], say: Say) -> Sent:
    """Send what may be sent, in order. What is forbidden is never tried; a refusal all the same is taken as one more that is left."""
    kept_back = {called(item) for item in await forbidden(cluster, {CLAIM: CREATE}, APPLY, objects)}
    sent, left = [], []
    for item in objects:
        if called(item) in kept_back:
            left.append(Left(item, await _look(cluster, item)))
            continue
        say(called(item))
        try:
            await send_one(cluster, item)
        except ApiError as error:
            if error.status not in (FORBIDDEN, NOT_FOUND):  # NOT_FOUND: the namespace or the kind's definition is among what is left
                raise
            left.append(Left(item, await _look(cluster, item), error.message))
            continue
        sent.append(item)
        if item["kind"] == DEFINITION:
            await until_established(cluster, item["metadata"]["name"])
    bounds = [part for part in left if part.item["kind"] in ADMISSION]
    notes = [
        f"left out {called(part.item)}: {part.reason or 'you may not send it'}; the operator works without it, with all that RBAC allows"
        for part in unsent(bounds)
    ]
    return Sent(tuple(sent), tuple(part for part in left if part not in bounds), tuple(notes))


async def losses(cluster: Cluster, objects: list[Object]) -> tuple[list[str], list[str]]:
    """Return a line for each stored object that would lose fields to the CRDs in `objects`, and the kinds of which only objects in the
    namespaces of `objects` may be listed. An account that may not send those CRDs takes nothing away.
    """
    definitions = [item for item in objects if item["kind"] == DEFINITION and item["spec"]["names"]["kind"] in KINDS]
    if not definitions or await forbidden(cluster, {}, APPLY, definitions):
        return [], []
    lines, unseen = [], []
    for spec in (item["spec"] for item in definitions):
        kind, stored = spec["names"]["kind"], next(version for version in spec["versions"] if version["storage"])
        items, sees_all = await _stored(cluster, kind, _places(objects) if KINDS[kind].namespaced else ())
        unseen += [] if sees_all else [kind]
        lines += loss_lines(items, stored["schema"]["openAPIV3Schema"])
    return lines, unseen


async def _stored(cluster: Cluster, kind: str, places: Collection[str], *, everywhere: bool = True) -> tuple[list[Object], bool]:
    """Return the objects of a kind, and True if all were seen. In `places` alone unless `everywhere` is asked for and allowed."""
    query = OF_JOBS if kind == "ConfigMap" else None
    listings = [await list_kind(cluster, kind, None, query)] if everywhere else []
    is_refused = any(listing.sight is Sight.FORBIDDEN for listing in listings)
    if is_refused or not everywhere:
        listings = [await list_kind(cluster, kind, place, query) for place in places]
    seen = all(listing.sight is not Sight.FORBIDDEN for listing in listings)
    return [item for listing in listings for item in listing.items], seen and not is_refused


def _places(objects: list[Object]) -> list[str]:
    return sorted({item["metadata"]["namespace"] for item in objects if item["metadata"].get("namespace")})


async def next_starts(cluster: Cluster, objects: list[Object]) -> tuple[list[tuple[Object, tuple[Change, ...] | Notice]], bool]:
    """Return each stored job that the operator in `objects` would start otherwise than it was started last, with what differs, or that it
    would not accept any more; and True if all jobs were seen. Jobs that have ended don't count.
    """
    operator = next((item for item in objects if item["kind"] == "Deployment"), None)
    if operator is None:
        return [], True
    scope = scope_of(operator)
    own = [json.loads(item["data"][PROFILE_KEY]) for item in objects if item["metadata"]["name"] == PROFILE_CONFIG]
    there, sees_clusters = (own, True) if scope.own else await _stored(cluster, CLUSTER, ())
    clusters = {item["metadata"]["name"]: item for item in (*there, *(item for item in objects if item["kind"] == CLUSTER))}
    places, everywhere = scope.namespaces or _places(objects), not scope.namespaces
    jobs, sees_jobs = await _stored(cluster, "TrainingJob", places, everywhere=everywhere)
    runs, sees_runs = await _stored(cluster, "ConfigMap", places, everywhere=everywhere)
    if not sees_clusters:
        return [], False
    by_name = {f"{run['metadata']['namespace']}/{run['metadata']['name']}": run for run in runs}
    found = []
    for job in jobs:
        status = job.get("status") or {}
        start = () if has_ended(status) else next_start(job, tuple(clusters.values()), by_name, image_of(operator))
        if start and (isinstance(start, tuple) or is_true(status, "Accepted")):
            found.append((job, start))
    return found, sees_jobs and sees_runs


async def standing_of(cluster: Cluster, objects: list[Object], own: list[Object]) -> AccountStanding:
    """Return the standing of this account: `objects` are those of an operator of the whole cluster, `own` those of one of a single
    namespace. Sends nothing.
    """
    lacks = tuple(await forbidden(cluster, {}, APPLY, needed_for_operator(objects)))
    if not lacks:
        return AccountStanding()
    return AccountStanding(
        lacks,
        may_have_own=not await forbidden(cluster, {CLAIM: CREATE}, APPLY, own),
        has_operator=(await read_object(cluster, "Lease", OPERATOR_NAMESPACE, OPERATOR_NAME)).first is not None,  # which everybody may read
        knows_jobs=await sight_of_jobs(cluster) is Sight.SEEN,
    )


async def remove_outdated(cluster: Cluster, scope: Scope) -> tuple[list[Object], list[Object]]:
    """Rights of the operator that another scope gave it and this one doesn't: those that were removed, and those that can't be."""
    whole = [item for item in outdated(scope) if await is_there(cluster, item)]
    # Who may not list Lockstep's RoleBindings has made none in other namespaces.
    bindings = await list_kind(cluster, "RoleBinding", None, {"labelSelector": f"{LABEL_NAME}={APP}"})
    named = [] if scope.own else [item for item in bindings.items if is_outdated(item, scope)]
    removed, stays = [], []
    for item in (*whole, *named):
        metadata = item["metadata"]
        with tolerated(FORBIDDEN):
            await cluster.delete(item["kind"], metadata.get("namespace"), metadata["name"])
            removed.append(item)
            continue
        stays.append(item)
    return removed, stays


async def _look(cluster: Cluster, item: Object) -> State:
    metadata = item["metadata"]
    with tolerated(FORBIDDEN):
        return state_of(item, await cluster.get(item["kind"], metadata.get("namespace"), metadata["name"]))
    if item["kind"] == DEFINITION and item["spec"]["group"] == GROUP and await sight_of_jobs(cluster) is not Sight.SEEN:
        return State.MISSING
    return State.UNSEEN


async def would_change(cluster: Cluster, item: Object) -> list[Change] | None:
    """Changes that sending `item` would make, by the API server's own dry run. None: it is not there.

    One that may only be read is compared field by field. Raises ApiError for any other refusal.
    """
    metadata = item["metadata"]
    differences: list[Change] = []
    for _ in range(LOOKS):
        before = await cluster.get(item["kind"], metadata.get("namespace"), metadata["name"])
        if before is None or item["kind"] in (*ONLY_CREATED, "TrainingJob"):  # of which an existing one stays as it is
            return None if before is None else []
        after = None
        with tolerated(FORBIDDEN):
            after = await cluster.apply(item, manager=FIELD_MANAGER, strict=True, dry_run=True)
        if after is None:
            return changes(item, before)
        differences = difference(after, before)
        if after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]:  # nobody wrote in between
            break
    return differences
