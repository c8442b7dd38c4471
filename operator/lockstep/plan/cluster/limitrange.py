"""What a namespace's LimitRanges make of a pod: what they write into it, and why the API server would then refuse it (pure).

As the API server goes about it: what has a limit and no request requests its limit; the ranges' defaults fill what is still not stated;
then the pod is checked. Containers and init containers are treated alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal

from lockstep.api.objects import Object
from lockstep.api.quantity import number
from lockstep.plan.waiting.requests import effective

Amounts = Mapping[str, str]
KINDS = ("containers", "initContainers")


@dataclass(frozen=True)
class Filled:
    """An amount that the API server writes into a container that doesn't state it."""

    range: str
    container: str
    which: str
    """requests or limits."""
    resource: str
    value: str


@dataclass(frozen=True)
class Refusal:
    """Why the API server would refuse the pod."""

    container: str
    """'' for the pod as a whole."""
    which: str
    """requests or limits: what has to be stated otherwise."""
    resource: str
    said: str
    quoted: str
    """The API server's own sentence."""


def default_requests_and_limits(limit_range: Object) -> tuple[dict[str, str], dict[str, str]]:
    """What a container gets that states none. A maximum is a default limit, too, and a default limit or a minimum a default request."""
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    for rule in rules(limit_range, "Container"):
        stated = {**amounts(rule, "max"), **amounts(rule, "default")}
        limits |= stated
        requests |= {**amounts(rule, "min"), **stated, **amounts(rule, "defaultRequest")}
    return requests, limits


def rules(limit_range: Object, kind: str) -> list[Object]:
    """`kind`: Container, Pod or PersistentVolumeClaim."""
    return [rule for rule in (limit_range.get("spec") or {}).get("limits") or [] if rule.get("type") == kind]


def amounts(rule: Object, name: str) -> dict[str, str]:
    """By resource. `name`: max, min, default or defaultRequest."""
    return {resource: str(value) for resource, value in (rule.get(name) or {}).items()}


def as_admitted(pod: Object, ranges: Iterable[Object]) -> tuple[Object, list[Filled]]:
    """The pod as the API server would go on with it, and what it has written into it."""
    ranges, filled = list(ranges), []
    spec = dict(pod["spec"])
    for kind in KINDS:
        if spec.get(kind):
            completed = [_completed(container, ranges) for container in spec[kind]]
            spec[kind] = [container for container, _ in completed]
            filled += [one for _, found in completed for one in found]
    return {**pod, "spec": spec}, filled


def _completed(container: Object, ranges: Iterable[Object]) -> tuple[Object, list[Filled]]:
    stated = container.get("resources") or {}
    limits = dict(stated.get("limits") or {})
    requests = limits | (stated.get("requests") or {})
    filled = []
    for limit_range in ranges:
        default_requests, default_limits = default_requests_and_limits(limit_range)
        for which, has, defaults in (("limits", limits, default_limits), ("requests", requests, default_requests)):
            for resource in sorted(defaults.keys() - has.keys()):
                has[resource] = defaults[resource]
                filled.append(Filled(limit_range["metadata"]["name"], container["name"], which, resource, defaults[resource]))
    return {**container, "resources": {"requests": requests, "limits": limits}}, filled


def containers(pod: Object) -> list[Object]:
    return [container for kind in KINDS for container in pod["spec"].get(kind) or []]


def refusals(pod: Object, filled: Iterable[Filled], ranges: Iterable[Object]) -> list[Refusal]:
    """Of a pod as admitted, with what was filled; of one container's resource only the first."""
    ranges = list(ranges)
    found: dict[tuple[str, str], Refusal] = {}
    for refusal in [*_above_default(pod, list(filled), ranges), *_out_of_bounds(pod, ranges)]:
        found.setdefault((refusal.container, refusal.resource), refusal)
    return list(found.values())


def _above_default(pod: Object, filled: list[Filled], ranges: list[Object]) -> Iterator[Refusal]:
    """Requests above the limit that a range has given: the pod is no valid one any more."""
    asked = {container["name"]: container["resources"]["requests"] for container in containers(pod)}
    for one in filled:
        value = asked[one.container].get(one.resource, "0")
        if one.which == "requests" or number(value) <= number(one.value):
            continue
        who, quoted = f"container {one.container}", f"must be less than or equal to {one.resource} limit of {one.value}"
        most = [amounts(rule, "max").get(one.resource) for limit_range in ranges for rule in rules(limit_range, "Container")]
        if any(text is not None and number(value) > number(text) for text in most):
            said = f"LimitRange {one.range} allows at most {one.value} {one.resource}, {who} has {value}"
            yield Refusal(one.container, "requests", one.resource, said, quoted)
        else:
            said = f"LimitRange {one.range} limits {who}, which states no limit, to {one.value} {one.resource}, and it requests {value}"
            yield Refusal(one.container, "limits", one.resource, said, quoted)


def _out_of_bounds(pod: Object, ranges: list[Object]) -> Iterator[Refusal]:
    for limit_range in ranges:
        name = str(limit_range["metadata"]["name"])
        for rule in rules(limit_range, "Container"):
            for container in containers(pod):
                resources = container["resources"]
                yield from _bounds(name, rule, container["name"], resources["requests"], resources["limits"])
        for rule in rules(limit_range, "Pod"):
            yield from _bounds(name, rule, "", *(of_whole_pod(pod, which) for which in ("requests", "limits")))


def of_whole_pod(pod: Object, which: str) -> dict[str, str]:
    """What its containers come to together, of each resource that one of them states."""
    stated = [((container.get("resources") or {}).get(which) or {}) for container in containers(pod)]
    return {resource: _spelled(effective(pod, resource, which), resource, stated) for each in stated for resource in each}


def _spelled(value: Decimal, resource: str, stated: list[Amounts]) -> str:
    """As a container spells it that has all of it, else the number."""
    return next((str(one[resource]) for one in stated if number(one.get(resource)) == value), f"{value:f}")


def _bounds(name: str, rule: Object, container: str, requests: Amounts, limits: Amounts) -> Iterator[Refusal]:
    who = f"container {container}" if container else "a pod"
    for resource, most in amounts(rule, "max").items():
        said, quoted = (
            f"LimitRange {name} allows at most {most} {resource}, {who}",
            f"maximum {resource} usage per {rule['type']} is {most}",
        )
        if resource not in limits:
            yield Refusal(container, "limits", resource, f"{said} states no limit", f"{quoted}.  No limit is specified")
        for which, has in (("limits", limits), ("requests", requests)):
            if number(has.get(resource)) > number(most):
                yield Refusal(container, which, resource, f"{said} has {has[resource]}", f"{quoted}, but {which[:-1]} is {has[resource]}")
    for resource, least in amounts(rule, "min").items():
        said, quoted = (
            f"LimitRange {name} wants at least {least} {resource}, {who}",
            f"minimum {resource} usage per {rule['type']} is {least}",
        )
        if resource not in requests:
            yield Refusal(container, "requests", resource, f"{said} requests none", f"{quoted}.  No request is specified")
        elif number(requests[resource]) < number(least):
            is_less = f"{quoted}, but request is {requests[resource]}"
            yield Refusal(container, "requests", resource, f"{said} has {requests[resource]}", is_less)
