"""Arithmetic that no dry run does: all pods and claims of a job against what a namespace's quotas have left (pure).

What the API server makes of one pod (limits that it doesn't state, bounds of a LimitRange, amounts that a quota wants stated) a dry run of that pod says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from lockstep.api.objects import Object
from lockstep.api.quantity import amount, number
from lockstep.plan.cluster.facts import ClusterFacts
from lockstep.plan.cluster.finding import Finding, Outcome
from lockstep.plan.waiting.nodes import effective, request, shown_amount

SECTION = "quota"
Amounts = Mapping[str, Decimal]
COUNTED = {
    "Service": "services", "Secret": "secrets", "ConfigMap": "configmaps", "PersistentVolumeClaim": "persistentvolumeclaims",
    "StatefulSet": "statefulsets.apps", "NetworkPolicy": "networkpolicies.networking.k8s.io",
}  # fmt: skip
BEYOND = {"cpu": "it is throttled there", "memory": "what takes more is killed, OOMKilled"}
"""Fate of a container that wants more than its limit."""

EXCEEDED = "exceeded quota"
"""Part of the API server's refusal of a pod for which a quota has no room at the moment."""


@dataclass(frozen=True)
class Shortage:
    """One amount of one quota that is too small for what is asked for, now or ever."""

    quota: str
    resource: str
    need: Decimal
    hard: Decimal
    free: Decimal

    @property
    def is_final(self) -> bool:
        """True if it is too small even when nobody else uses any of it."""
        return self.need > self.hard


def shortages(quota: Object, pod: Object, need: Amounts, present: Amounts) -> Iterator[Shortage]:
    """`need`: by the quota's own names. `present`: the part of what is used that is free for this job again: its own pods'."""
    if not in_scope(quota, pod):
        return
    status = quota.get("status") or {}
    for resource, stated in (status.get("hard") or (quota.get("spec") or {}).get("hard") or {}).items():
        hard, wants = amount(str(stated)), need.get(resource)
        if hard is None or not wants:
            continue
        free = hard - number((status.get("used") or {}).get(resource)) + present.get(resource, Decimal(0))
        if wants > min(hard, free):
            yield Shortage(str(quota["metadata"]["name"]), resource, wants, hard, free)


def quota_findings(pod: Object, pods: int, others: Sequence[Object], facts: ClusterFacts) -> Iterator[Finding]:
    """`pod`: as the API server would admit it. `others`: what else would be made, claims of every pod among them."""
    quotas = facts.list("ResourceQuota")
    if not quotas.seen:
        yield Finding(SECTION, Outcome.UNKNOWN, "whether a ResourceQuota leaves room: your account may not list them")
    else:
        need, present = job_amounts(pod, pods, others), job_amounts(pod, len(facts.own_pods), ())
        short = [_short(one) for quota in quotas.items for one in shortages(quota, pod, need, present)]
        yield from short or [Finding(SECTION, Outcome.OK, _no_obstacle(quotas.items))]
    claims = [item for item in others if item["kind"] == "PersistentVolumeClaim"]
    for limit_range in facts.list("LimitRange").items:
        for rule in (limit_range.get("spec") or {}).get("limits") or []:
            for claim in claims if rule.get("type") == "PersistentVolumeClaim" else ():
                yield from _claim_bounds(limit_range["metadata"]["name"], rule, claim)


def _no_obstacle(quotas: Sequence[Object]) -> str:
    return f"{', '.join(sorted(q['metadata']['name'] for q in quotas))} leaves room" if quotas else "the namespace has no ResourceQuota"


def _short(one: Shortage) -> Finding:
    plain = one.resource.removeprefix("requests.").removeprefix("limits.")
    need, hard = _shown(one.need, plain), _shown(one.hard, plain)
    asks = f"the job asks for {need} {one.resource}"
    if one.is_final:
        fix = f"ask for less, or have an administrator raise it (kubectl describe quota {one.quota})"
        return Finding(SECTION, Outcome.REFUSED, f"quota {one.quota} allows {hard} in all, {asks}", fix)
    left = _shown(max(one.free, Decimal(0)), plain)
    awaited = f"quota {one.quota} to have {need} {one.resource} free"
    return Finding(
        SECTION, Outcome.WAITS, f"quota {one.quota} has {left} of {hard} left, {asks}", f"kubectl describe quota {one.quota}", awaited
    )


def job_amounts(pod: Object, pods: int, others: Iterable[Object]) -> dict[str, Decimal]:
    """Everything that a quota may count, by the quota's own names."""
    need: Counter[str] = Counter()
    for key, value in pod_amounts(pod).items():
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


def pod_amounts(pod: Object) -> dict[str, Decimal]:
    """Amounts of one pod, by the quota's own names."""
    need = {"pods": Decimal(1), "count/pods": Decimal(1)}
    for which in ("requests", "limits"):
        for resource in {name for c in containers(pod) for name in _amounts(c, which)}:
            value = request(pod, resource) if which == "requests" else effective(pod, resource, which)
            need[f"{which}.{resource}"] = value
            if which == "requests" and resource in ("cpu", "memory", "ephemeral-storage"):
                need[resource] = value
    return need


def containers(pod: Object) -> list[Object]:
    return [container for kind in ("containers", "initContainers") for container in pod["spec"].get(kind) or []]


def _amounts(container: Object, which: str) -> dict[str, str]:
    return (container.get("resources") or {}).get(which) or {}


def limits_given(stated: Object, admitted: Object | None) -> dict[str, dict[str, str]]:
    """Container → the limits by resource that it doesn't state, and that a LimitRange has given it in the pod that the API server admitted."""
    before = {container["name"]: _amounts(container, "limits") for container in containers(stated)}
    given = {
        str(container["name"]): {key: value for key, value in _amounts(container, "limits").items() if key not in before[container["name"]]}
        for container in containers(admitted or stated)
        if container["name"] in before
    }
    return {name: limits for name, limits in given.items() if limits}


def _count_claim(need: Counter[str], claim: Object) -> None:
    size = number(claim["spec"]["resources"]["requests"]["storage"])
    need["requests.storage"] += size  # type: ignore[assignment]
    storage_class = claim["spec"].get("storageClassName")
    if storage_class:
        need[f"{storage_class}.storageclass.storage.k8s.io/requests.storage"] += size  # type: ignore[assignment]
        need[f"{storage_class}.storageclass.storage.k8s.io/persistentvolumeclaims"] += 1


def _shown(value: Decimal, resource: str) -> str:
    return shown_amount(value, "memory" if resource.endswith("storage") else resource)


def in_scope(quota: Object, pod: Object) -> bool:
    """Return True if the quota counts such pods. Ours always ask for something, so they are never BestEffort; they have no deadline of their own."""
    spec = quota.get("spec") or {}
    rules = (spec.get("scopeSelector") or {}).get("matchExpressions") or []
    scopes = {*(spec.get("scopes") or []), *(str(rule["scopeName"]) for rule in rules if rule["scopeName"] != "PriorityClass")}
    if scopes & {"BestEffort", "Terminating", "CrossNamespacePodAffinity"}:
        return False
    return all(_priority_fits(rule, pod["spec"].get("priorityClassName", "")) for rule in rules if rule["scopeName"] == "PriorityClass")


def _priority_fits(rule: Object, priority: str) -> bool:
    listed = priority in (rule.get("values") or [])
    return {"In": listed, "NotIn": not listed, "Exists": bool(priority), "DoesNotExist": not priority}.get(str(rule["operator"]), True)


def _claim_bounds(name: str, rule: Object, claim: Object) -> Iterator[Finding]:
    asks, who = claim["spec"]["resources"]["requests"]["storage"], f"claim {claim['metadata']['name']}"
    most, least = ((rule.get(bound) or {}).get("storage") for bound in ("max", "min"))
    fix = "change the cluster's storage sizes, or the range"
    if most is not None and number(asks) > number(most):
        yield Finding(SECTION, Outcome.REFUSED, f"LimitRange {name} allows at most {most} storage, {who} has {asks}", fix)
    if least is not None and number(asks) < number(least):
        yield Finding(SECTION, Outcome.REFUSED, f"LimitRange {name} wants at least {least} storage, {who} has {asks}", fix)
