"""What a namespace's ResourceQuotas and LimitRanges leave for a job (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal

from lockstep.api import names
from lockstep.api.objects import Object
from lockstep.api.quantity import number
from lockstep.plan.cluster.limitrange import Filled, Refusal, as_admitted, containers, refusals, rules
from lockstep.plan.cluster.lookahead import Around, Line, Outcome
from lockstep.plan.waiting.nodes import shown_amount
from lockstep.plan.waiting.requests import effective, request

SECTION = "quota"
Amounts = Mapping[str, Decimal]
COUNTED = {
    "Service": "services", "Secret": "secrets", "ConfigMap": "configmaps", "PersistentVolumeClaim": "persistentvolumeclaims",
    "StatefulSet": "statefulsets.apps", "NetworkPolicy": "networkpolicies.networking.k8s.io",
}  # fmt: skip
MUST_STATE = frozenset({"cpu", "memory", *(f"{which}.{name}" for which in ("requests", "limits") for name in ("cpu", "memory"))})
"""Of these, a quota that counts them refuses a pod with a container that doesn't state its amount; init containers, too."""
BEYOND = {"cpu": " (it is throttled there)", "memory": " (what takes more is killed, OOMKilled)"}


def quota_lines(pod: Object, pods: int, others: Sequence[Object], around: Around) -> Iterator[Line]:
    """`others`: what else would be made, claims of every pod among them."""
    pod, filled = as_admitted(pod, around.ranges or ())
    if around.quotas is None:
        yield Line(SECTION, Outcome.UNKNOWN, "whether a ResourceQuota leaves room: your account may not list them")
    else:
        running = len(around.own_pods or ())
        need, there = needed(pod, pods, others), needed(pod, running, ())
        found = [line for quota in around.quotas for line in _quota(quota, pod, need, there)]
        yield from found or [Line(SECTION, Outcome.OK, _no_obstacle(around.quotas))]
    yield from _ranges(pod, filled, others, around.ranges or ())


def _no_obstacle(quotas: Sequence[Object]) -> str:
    return f"{', '.join(sorted(q['metadata']['name'] for q in quotas))} leaves room" if quotas else "the namespace has no ResourceQuota"


def needed(pod: Object, pods: int, others: Iterable[Object]) -> dict[str, Decimal]:
    """Everything that a quota may count, by the quota's own names."""
    need: Counter[str] = Counter()
    for key, value in of_pod(pod).items():
        need[key] += value * pods  # type: ignore[assignment]
    for item in others:
        plural = COUNTED.get(item["kind"])
        if plural is None:
            continue
        need[f"count/{plural}"] += 1
        need[plural] += 1
        if item["kind"] == "PersistentVolumeClaim":
            _count_claim(need, item)
    return {key: Decimal(value) for key, value in need.items()}


def of_pod(pod: Object) -> dict[str, Decimal]:
    need = {"pods": Decimal(1), "count/pods": Decimal(1)}
    for which in ("requests", "limits"):
        for resource in {name for c in containers(pod) for name in ((c.get("resources") or {}).get(which) or {})}:
            value = request(pod, resource) if which == "requests" else effective(pod, resource, which)
            need[f"{which}.{resource}"] = value
            if which == "requests" and resource in ("cpu", "memory", "ephemeral-storage"):
                need[resource] = value
    return need


def _count_claim(need: Counter[str], claim: Object) -> None:
    size = number(claim["spec"]["resources"]["requests"]["storage"])
    need["requests.storage"] += size  # type: ignore[assignment]
    storage_class = claim["spec"].get("storageClassName")
    if storage_class:
        need[f"{storage_class}.storageclass.storage.k8s.io/requests.storage"] += size  # type: ignore[assignment]
        need[f"{storage_class}.storageclass.storage.k8s.io/persistentvolumeclaims"] += 1


def _quota(quota: Object, pod: Object, need: Amounts, there: Amounts) -> Iterator[Line]:
    if not in_scope(quota, pod):
        return
    name, status = quota["metadata"]["name"], quota.get("status", {})
    counted = status.get("hard") or quota["spec"].get("hard") or {}
    missing = unstated(counted, pod)
    if missing:
        said = f"quota {name} counts {', '.join(missing)}, so every container must state it"
        quoted = "; ".join(f"{resource} for: {','.join(who)}" for resource, who in missing.items())
        fix = "state it in the cluster's resources, or have an administrator make a LimitRange with defaults"
        yield Line(SECTION, Outcome.REFUSED, f'{said}: refused with "failed quota: {name}: must specify {quoted}"', fix)
    for resource, stated in counted.items():
        if not need.get(resource):
            continue
        hard, used = number(stated), number((status.get("used") or {}).get(resource))
        free, plain = hard - used + there.get(resource, Decimal(0)), resource.removeprefix("requests.").removeprefix("limits.")
        asks = f"the job asks for {_shown(need[resource], plain)} {resource}"
        if need[resource] > hard:
            fix = f"ask for less, or have an administrator raise it (kubectl describe quota {name})"
            yield Line(SECTION, Outcome.REFUSED, f"quota {name} allows {_shown(hard, plain)} in all, {asks}", fix)
        elif need[resource] > free:
            left = _shown(max(free, Decimal(0)), plain)
            awaited = f"quota {name} to have {_shown(need[resource], plain)} {resource} free"
            yield Line(
                SECTION,
                Outcome.WAITS,
                f"quota {name} has {left} of {_shown(hard, plain)} left, {asks}",
                f"kubectl describe quota {name}",
                awaited,
            )


def unstated(counted: Iterable[str], pod: Object) -> dict[str, list[str]]:
    """What the quota counts of CPU and memory and a container doesn't state → the names of such containers, both in the API server's order."""
    found = {}
    for resource in sorted(MUST_STATE.intersection(counted)):
        which, _, name = resource.rpartition(".")
        without = [c["name"] for c in containers(pod) if name not in ((c.get("resources") or {}).get(which or "requests") or {})]
        if without:
            found[resource] = sorted(without)
    return found


def _shown(value: Decimal, resource: str) -> str:
    return shown_amount(value, "memory" if resource.endswith("storage") else resource)


def in_scope(quota: Object, pod: Object) -> bool:
    """Whether the quota counts such pods. Ours always ask for something, so they are never BestEffort; they have no deadline of their own."""
    scopes = {*(quota["spec"].get("scopes") or [])}
    rules = (quota["spec"].get("scopeSelector") or {}).get("matchExpressions") or []
    scopes |= {str(rule["scopeName"]) for rule in rules if rule["scopeName"] != "PriorityClass"}
    if scopes & {"BestEffort", "Terminating", "CrossNamespacePodAffinity"}:
        return False
    return all(_priority_fits(rule, pod["spec"].get("priorityClassName", "")) for rule in rules if rule["scopeName"] == "PriorityClass")


def _priority_fits(rule: Object, priority: str) -> bool:
    listed = priority in (rule.get("values") or [])
    return {"In": listed, "NotIn": not listed, "Exists": bool(priority), "DoesNotExist": not priority}.get(str(rule["operator"]), True)


def _ranges(pod: Object, filled: Sequence[Filled], others: Iterable[Object], ranges: Sequence[Object]) -> Iterator[Line]:
    refused = refusals(pod, filled, ranges)
    for one in refused:
        yield Line(SECTION, Outcome.REFUSED, f'{one.said}: refused with "{one.quoted}"', _mended(one))
    told = {(one.container, one.resource) for one in refused}
    for name in dict.fromkeys(one.container for one in filled):
        given = [one for one in filled if one.container == name and one.which == "limits" and (name, one.resource) not in told]
        if given:
            listed = ", ".join(f"{one.value} {one.resource}{BEYOND.get(one.resource, '')}" for one in given)
            said = f"LimitRange {', '.join(dict.fromkeys(one.range for one in given))} limits container {name}, which states no limit, to {listed}"
            yield Line(SECTION, Outcome.NOTE, said, "state resources.limits in the cluster")
    claims = [item for item in others if item["kind"] == "PersistentVolumeClaim"]
    for limit_range in ranges:
        for rule in rules(limit_range, "PersistentVolumeClaim"):
            for claim in claims:
                yield from _claim_bounds(limit_range["metadata"]["name"], rule, claim)


def _mended(one: Refusal) -> str:
    if one.container == names.AGENT_CONTAINER:
        return "change the range: this container is Lockstep's own, and no cluster says what it needs"
    return f"change the cluster's resources.{one.which}.{one.resource}, or the range"


def _claim_bounds(name: str, rule: Object, claim: Object) -> Iterator[Line]:
    asks, who = claim["spec"]["resources"]["requests"]["storage"], f"claim {claim['metadata']['name']}"
    most, least = ((rule.get(bound) or {}).get("storage") for bound in ("max", "min"))
    fix = "change the cluster's storage sizes, or the range"
    if most is not None and number(asks) > number(most):
        yield Line(SECTION, Outcome.REFUSED, f"LimitRange {name} allows at most {most} storage, {who} has {asks}", fix)
    if least is not None and number(asks) < number(least):
        yield Line(SECTION, Outcome.REFUSED, f"LimitRange {name} wants at least {least} storage, {who} has {asks}", fix)
