"""Under what rights pods run here: platform, SCC, locked memory, quota."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.plan.cluster.facts import ClusterFacts
from lockstep.plan.discovery.draft import Entry, left_out, stated
from lockstep.plan.discovery.rails import is_unlimited


def security_entries(facts: ClusterFacts, *, rdma: bool) -> Iterator[Entry]:
    """The section `security`."""
    yield stated("security.service_account", "ml-dev-sa", "made by `lockstep deploy`; a choice, not a finding")
    if rdma and not is_unlimited(facts.probes):
        yield stated(
            "security.ipc_lock", True, f"NICs need locked memory, and nothing shows that the runtime lifted its limit{_scc(facts)}"
        )
    elif rdma:
        yield left_out("security.ipc_lock", False, "not needed: network.rdma.memlock is unlimited")


def _scc(facts: ClusterFacts) -> str:
    if not facts.is_openshift:
        return ""
    seen = facts.list("SecurityContextConstraints")
    if not seen.seen:
        return f"; which SCC allows it is unknown: {seen.why_not}"
    allowing = sorted(str(item["metadata"]["name"]) for item in seen.items if allows_ipc_lock(item))
    return f"; SCCs that allow IPC_LOCK: {', '.join(allowing) or 'none yet, lockstep deploy brings one'}"


def allows_ipc_lock(scc: dict[str, object]) -> bool:
    allowed = scc.get("allowedCapabilities") or []
    return isinstance(allowed, list) and ("IPC_LOCK" in allowed or "*" in allowed)


def limits_said(facts: ClusterFacts) -> list[str]:
    """Quotas and limit ranges of the namespace, for the header: no key of the file holds them."""
    lines = []
    for kind, word in (("ResourceQuota", "quota"), ("LimitRange", "limit range")):
        seen = facts.list(kind)
        if not seen.seen:
            lines.append(f"{word}: unknown: {seen.why_not}")
        for item in seen.items:
            lines.append(f"{word} {item['metadata']['name']} of namespace {facts.namespace}: {_values(item)}")
    return lines


def _values(item: dict[str, dict[str, object]]) -> str:
    hard = item["spec"].get("hard")
    if isinstance(hard, dict):
        return ", ".join(f"{key} {value}" for key, value in sorted(hard.items()))
    limits = item["spec"].get("limits")
    told = [
        f"{limit.get('type')} {name} {', '.join(f'{key} {value}' for key, value in sorted(limit[name].items()))}"
        for limit in (limits if isinstance(limits, list) else [])
        for name in ("min", "max", "default", "defaultRequest", "maxLimitRequestRatio")
        if limit.get(name)
    ]
    return "; ".join(told) or "no limits"
