"""Sends to a cluster what the rights of a person allow, and finds out how the rest is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.api.names import API_VERSION, GROUP
from lockstep.plan.deploy import CLAIM, DEFINITION, Left, State, called, open_ones, state_of
from lockstep.platforms.kubernetes.cluster import FORBIDDEN, NOT_FOUND, ApiError, Cluster, Object
from lockstep.platforms.kubernetes.install import send_one, until_established
from lockstep.platforms.kubernetes.rights import forbidden

Say = Callable[[str], None]
CREATE = ("create",)
APPLY = ("create", "patch")


@dataclass(frozen=True)
class Sent:
    """What is on the cluster now as it was rendered, and what is left."""

    objects: tuple[Object, ...]
    left: tuple[Left, ...]

    @property
    def is_complete(self) -> bool:
        """As far as this person may see."""
        return all(part.state is State.UNSEEN for part in open_ones(self.left))

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
    return Sent(tuple(sent), tuple(left))


async def _look(cluster: Cluster, item: Object) -> State:
    metadata = item["metadata"]
    try:
        return state_of(item, await cluster.get(item["kind"], metadata.get("namespace"), metadata["name"]))
    except ApiError as error:
        if error.status != FORBIDDEN:
            raise
    if item["kind"] == DEFINITION and item["spec"]["group"] == GROUP and not await _is_served(cluster):
        return State.MISSING
    return State.UNSEEN


async def _is_served(cluster: Cluster) -> bool:
    """Everybody may ask which kinds there are, though not for their definitions."""
    try:
        await cluster.request("GET", f"/apis/{API_VERSION}")
    except ApiError as error:
        if error.status in (NOT_FOUND, FORBIDDEN):
            return False
        raise
    return True
