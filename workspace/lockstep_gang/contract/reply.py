"""The operator's answer to a report: what only the cluster knows of the job's nodes. It gives no orders: who is to stop gets SIGTERM from
its pod.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from lockstep_spec.choices import Choice
from lockstep_spec.codec import ContractError, camel, to_json

FACT_CHARACTERS = 256


class FactType(Choice):
    """Kind of fact that the cluster knows of a pod of the job. All but the last say why what ran there is gone."""

    NODE_LOST = "NodeLost"  # its Node is not Ready, or gone
    PREEMPTED = "Preempted"  # for a pod of higher priority, or by the queue
    EVICTED = "Evicted"  # by its Node's pressure, a taint, a drain
    OUT_OF_MEMORY = "OutOfMemory"  # the kernel killed its container at its limit, the agent with it
    CONTAINER_ENDED = "ContainerEnded"  # its container was killed otherwise, and starts again
    DELETED = "Deleted"  # by somebody else than Lockstep
    WAITING = "Waiting"  # it doesn't run yet: `reason` says why


@dataclass(frozen=True)
class Fact:
    """One fact about one pod of the job."""

    type: FactType
    node: int
    """Its index in the job, which is the pod's."""
    pod: str
    reason: str
    """One word, as Kubernetes has it: NotReady, PreemptionByScheduler, ImagePullBackOff, Unschedulable …"""
    message: str = ""
    """One sentence for a person, at most 256 characters."""
    pod_uid: str = ""
    """Tells the fact from one about an earlier pod of this name; empty: there is no pod."""
    node_name: str = ""
    """The Node that it is or was on."""
    since: str | None = None
    """RFC 3339."""


@dataclass(frozen=True)
class Reply:
    facts: tuple[Fact, ...] = ()
    racks: tuple[str, ...] = ()
    """Rack of node i, empty where its Node has none; (): nothing is known of racks."""


def reply_json(reply: Reply) -> dict[str, Any]:
    """The reply's body as plain JSON values."""
    return {"facts": [to_json(fact) for fact in reply.facts], "racks": list(reply.racks)}


def parse_reply(body: bytes) -> Reply:
    """Read with tolerance: the operator may be newer than a running gang. Raises ContractError when it is no reply at all."""
    try:
        value = json.loads(body)
        facts = [_fact(item) for item in value.get("facts", [])]
        racks = tuple(str(rack)[:FACT_CHARACTERS] for rack in value.get("racks", []))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ContractError(f'the reply is not {{"facts": [{{"type": …}}], …}}: {error!r}') from None
    return Reply(tuple(fact for fact in facts if fact is not None), racks)


_TEXTS = ("pod", "reason", "message", "pod_uid", "node_name")


def _fact(value: Any) -> Fact | None:
    """None for a type that this version doesn't know, and for what is no fact."""
    types = {member.value: member for member in FactType}
    if not isinstance(value, dict) or value.get("type") not in types or type(value.get("node")) is not int:
        return None
    texts = {name: str(value.get(camel(name), ""))[:FACT_CHARACTERS] for name in _TEXTS}
    since = value.get("since")
    return Fact(type=types[value["type"]], node=value["node"], since=since if isinstance(since, str) else None, **texts)
