"""Page of `doctor`: a line a host, a sentence at the end, and the same as values for programs (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lockstep.plan.cluster.finding import Finding, Outcome
from lockstep.plan.cluster.pairs import gigabits
from lockstep.plan.hosts.condition import HostLook
from lockstep.plan.hosts.reach import HostNetwork
from lockstep_spec.words import decimal_size, number_of

COLUMNS = ("HOST", "ADDRESS", "INTERFACE", "PYTHON", "GPUS", "FREE DISK", "TO NEXT", "ANSWERS IN")
NONE = "-"


def host_rows(looks: Sequence[HostLook], network: HostNetwork | None) -> list[tuple[str, ...]]:
    """Head of the table, and a row a host."""
    return [COLUMNS, *(_row(number, look, network) for number, look in enumerate(looks))]


def _row(number: int, look: HostLook, network: HostNetwork | None) -> tuple[str, ...]:
    if look.facts is None:
        return (look.name, look.host.address or NONE, *[NONE] * 5, "no answer")
    end = None if network is None else network.ends.get(number)
    libraries = look.condition.libraries if look.condition else None
    kinds = Counter(gpu.name for gpu in look.facts.gpus)
    rate = None if network is None else next((rate for rate in network.rates if rate.sender == number and not rate.error), None)
    return (
        look.name,
        end.address if end else look.host.address or NONE,
        NONE if end is None or not end.interface else end.interface + (f" {gigabits(end.gbs)} Gb/s" if end.gbs else ""),
        libraries.python if libraries and libraries.python else NONE,
        ", ".join(f"{count} × {name}" for name, count in kinds.items()) or "none",
        decimal_size(look.facts.workspace.free),
        NONE if rate is None else f"{gigabits(rate.gbs)} Gb/s",
        f"{look.seconds * 1000:.0f} ms",
    )


def summary(looks: Sequence[HostLook], findings: Sequence[Finding]) -> str:
    """One sentence about all of it."""
    fails = sum(one.outcome in (Outcome.FAILED, Outcome.REFUSED) for one in findings)
    warns = sum(one.outcome in (Outcome.WARNING, Outcome.RISK) for one in findings)
    hosts = number_of(len(looks), "host")
    if not fails and not warns:
        return f"{hosts}: ready"
    return f"{hosts}: {number_of(fails, 'failure')}, {number_of(warns, 'warning')}"


def host_values(looks: Sequence[HostLook], network: HostNetwork | None) -> list[dict[str, Any]]:
    """Each host as an object."""
    return [_host(number, look, network) for number, look in enumerate(looks)]


def _host(number: int, look: HostLook, network: HostNetwork | None) -> dict[str, Any]:
    if look.facts is None:
        return {"name": look.name, "problem": look.problem}
    end = None if network is None else network.ends.get(number)
    libraries = look.condition.libraries if look.condition else None
    return {
        "name": look.name,
        "user": look.facts.user,
        "address": end.address if end else look.host.address,
        "interface": end.interface if end else None,
        "mtu": end.mtu if end else None,
        "gigabits": end.gbs if end else None,
        "python": libraries.python if libraries else None,
        "packages": dict(libraries.packages) if libraries else {},
        "gpus": [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "name": gpu.name,
                "memoryBytes": gpu.memory,
                "users": list(gpu.users),
                "claim": gpu.claim,
            }
            for gpu in look.facts.gpus
        ],
        "freeBytes": look.facts.workspace.free,
        "startSeconds": round(look.seconds, 4),
        "clockSeconds": round(look.clock_seconds, 3),
    }


def network_values(network: HostNetwork) -> dict[str, Any]:
    """Knocks and rates between hosts."""
    names = network.names
    return {
        "knocks": [
            {
                "from": names[knock.sender],
                "to": names[knock.receiver],
                "port": knock.port,
                "purpose": knock.purpose,
                "problem": knock.reason,
            }
            for knock in network.knocks
        ],
        "rates": [
            {
                "from": names[rate.sender],
                "to": names[rate.receiver],
                "gigabits": None if rate.error else round(rate.gbs, 4),
                "microseconds": rate.microseconds,
                "problem": rate.error,
            }
            for rate in network.rates
        ],
    }
