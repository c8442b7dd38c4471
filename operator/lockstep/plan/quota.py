"""What a namespace's ResourceQuotas and LimitRanges leave for a job (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal

from lockstep.plan.diff import amount
from lockstep.plan.fitting import effective, request
from lockstep.plan.lookahead import Around, Line, Object, Outcome
from lockstep.plan.nodes import shown_amount

SECTION = "quota"
Amounts = Mapping[str, Decimal]
COUNTED = {
    "Service": "services", "Secret": "secrets", "ConfigMap": "configmaps", "PersistentVolumeClaim": "persistentvolumeclaims",
    "StatefulSet": "statefulsets.apps", "NetworkPolicy": "networkpolicies.networking.k8s.io",
}  # fmt: skip


def quota_lines(pod: Object, pods: int, others: Sequence[Object], around: Around) -> Iterator[Line]:
    """`others`: what else would be made, claims of every pod among them."""
    if around.quotas is None:
        yield Line(SECTION, Outcome.UNKNOWN, "whether a ResourceQuota leaves room: your account may not list them")
    else:
        running = len(around.own_pods or ())
        need, there = needed(pod, pods, others), needed(pod, running, ())
        found = [line for quota in around.quotas for line in _quota(quota, pod, need, there)]
        yield from found or [Line(SECTION, Outcome.OK, _no_obstacle(around.quotas))]
    for limits in around.ranges or ():
        yield from _range(limits, pod, others)


def _no_obstacle(quotas: Sequence[Object]) -> str:
    return f"{', '.join(sorted(q['metadata']['name'] for q in quotas))} leaves room" if quotas else "the namespace has no ResourceQuota"


def needed(pod: Object, pods: int, others: Iterable[Object]) -> dict[str, Decimal]:
    """Everything that a quota may count, by the quota's own names."""
    need: Counter[str] = Counter()
    for key, value in _of_pod(pod).items():
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


def _of_pod(pod: Object) -> dict[str, Decimal]:
    containers = [*pod["spec"].get("containers", []), *(pod["spec"].get("initContainers") or [])]
    need = {"pods": Decimal(1), "count/pods": Decimal(1)}
    for which in ("requests", "limits"):
        for resource in {name for c in containers for name in ((c.get("resources") or {}).get(which) or {})}:
            value = request(pod, resource) if which == "requests" else effective(pod, resource, which)
            need[f"{which}.{resource}"] = value
            if which == "requests" and resource in ("cpu", "memory", "ephemeral-storage"):
                need[resource] = value
    return need


def _count_claim(need: Counter[str], claim: Object) -> None:
    size = amount(claim["spec"]["resources"]["requests"]["storage"]) or Decimal(0)
    need["requests.storage"] += size  # type: ignore[assignment]
    storage_class = claim["spec"].get("storageClassName")
    if storage_class:
        need[f"{storage_class}.storageclass.storage.k8s.io/requests.storage"] += size  # type: ignore[assignment]
        need[f"{storage_class}.storageclass.storage.k8s.io/persistentvolumeclaims"] += 1


def _quota(quota: Object, pod: Object, need: Amounts, there: Amounts) -> Iterator[Line]:
    if not in_scope(quota, pod):
        return
    name, status = quota["metadata"]["name"], quota.get("status", {})
    for resource, stated in (status.get("hard") or quota["spec"].get("hard") or {}).items():
        if not need.get(resource):
            continue
        hard, used = amount(stated) or Decimal(0), amount((status.get("used") or {}).get(resource, "0")) or Decimal(0)
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


def _range(limits: Object, pod: Object, others: Iterable[Object]) -> Iterator[Line]:
    """Minima and maxima; defaults are what the API server fills in itself."""
    name = limits["metadata"]["name"]
    claims = [item for item in others if item["kind"] == "PersistentVolumeClaim"]
    for rule in limits["spec"].get("limits", []):
        if rule["type"] == "Container":
            for container in pod["spec"].get("containers", []):
                stated = container.get("resources") or {}
                yield from _bounds(name, rule, f"container {container['name']}", stated.get("requests") or {}, stated.get("limits") or {})
        elif rule["type"] == "Pod":
            need = _of_pod(pod)
            sums = [
                {key.removeprefix(which): str(value) for key, value in need.items() if key.startswith(which)}
                for which in ("requests.", "limits.")
            ]
            yield from _bounds(name, rule, "a pod", *sums)
        elif rule["type"] == "PersistentVolumeClaim":
            for claim in claims:
                asks = claim["spec"]["resources"]["requests"]
                yield from _bounds(name, rule, f"claim {claim['metadata']['name']}", asks, asks)


def _bounds(name: str, rule: Object, who: str, requests: Mapping[str, str], limits: Mapping[str, str]) -> Iterator[Line]:
    for resource, stated in (rule.get("max") or {}).items():
        asks = limits.get(resource, requests.get(resource))
        if asks is not None and (amount(asks) or 0) > (amount(stated) or 0):
            yield Line(
                SECTION,
                Outcome.REFUSED,
                f"LimitRange {name} allows at most {stated} {resource}, {who} has {asks}",
                "change the profile's resources, or the range",
            )
    for resource, stated in (rule.get("min") or {}).items():
        asks = requests.get(resource)
        if asks is not None and (amount(asks) or 0) < (amount(stated) or 0):
            yield Line(
                SECTION,
                Outcome.REFUSED,
                f"LimitRange {name} wants at least {stated} {resource}, {who} has {asks}",
                "change the profile's resources, or the range",
            )
