"""Hosts that see the same folder, and what follows from it; and ports that a copy may listen on (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.api.errors import ConfigError
from lockstep.api.hosts import HostsCluster
from lockstep.plan.cluster.finding import Finding, Outcome, failed, unknown, warning
from lockstep.plan.hosts.facts import HostFacts
from lockstep.plan.hosts.place import BLOCK
from lockstep_spec.choices import StorageMode


def groups_of(marks: Mapping[str, str], seen: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Hosts by the folder that they share, each in the order of `marks`. A host that sees another's mark, or is seen, shares its folder.

    `marks`: mark of each host; '' where it could write none. `seen`: marks that each host sees.
    """
    group = {host: {host} for host in marks}
    owner = {mark: host for host, mark in marks.items() if mark}
    for host, names in seen.items():
        for name in names:
            other = owner.get(name)
            if other is not None and host in group and other not in group[host]:
                together = group[host] | group[other]
                for one in together:
                    group[one] = together
    found: list[list[str]] = []
    for host in marks:
        if not any(host in one for one in found):
            found.append([one for one in marks if one in group[host]])
    return found


@dataclass(frozen=True)
class Sharing:
    """Hosts by the folder that they share, and those of which that may not be known."""

    groups: Sequence[Sequence[str]]
    """Each host once. In a group, those come first that can write there."""
    unwritable: Mapping[str, str] = field(default_factory=dict)
    """Path and reason of each host where nothing can be written, by host. It may see what others write."""
    unasked: Mapping[str, str] = field(default_factory=dict)
    """Reason for which a host gave no answer, by host."""

    @property
    def known(self) -> list[Sequence[str]]:
        """The groups without hosts that stand alone because nothing of theirs could be seen, or they couldn't look."""
        return [group for group in self.groups if len(group) > 1 or group[0] not in {**self.unwritable, **self.unasked}]


def sharing_findings(sharing: Sharing, mode: StorageMode, folder: str) -> Iterator[Finding]:
    """Judge who can write to a folder and who sees whose files there, against what the cluster file states."""
    for host, problem in sharing.unwritable.items():
        yield failed(host, f"nothing can be written to its workspace: {problem}", "mend that, or state another hosts[].workspace")
    if mode is StorageMode.SHARED:
        for host, problem in sharing.unasked.items():
            yield unknown("storage", f"whether host {host} sees what the others write to {folder}: {problem}")
    together = [group for group in sharing.known if len(group) > 1]
    if mode is StorageMode.SHARED and len(sharing.known) > 1:
        apart = " and not by ".join(f"{'/'.join(group)}" for group in sharing.known)
        yield failed(
            "storage",
            f"storage.mode is rwx, but what a host writes to {folder} is seen by {apart}",
            "mount the same file system there on all of them, or set storage.mode to volumeClaimTemplates in the cluster file",
        )
    elif mode is not StorageMode.SHARED and together:
        hosts = "; ".join(", ".join(group) for group in together)
        yield warning(
            "storage",
            f"{hosts} see one and the same {folder}, though storage.mode says that each host has its own: copies for a lost disk would lie"
            " on that one disk",
            "state storage.mode: rwx where all hosts share it",
        )


def refuse_apart(sharing: Sharing, mode: StorageMode, folder: str) -> str:
    """Return what to say where hosts with folders of their own see the same one; '' for nothing.

    Raises ConfigError naming the hosts, where nothing can be written, or one file system was stated and they don't see it, or nobody knows.
    """
    findings = list(sharing_findings(sharing, mode, folder))
    refusals = [one for one in findings if one.outcome in (Outcome.FAILED, Outcome.UNKNOWN)]
    if refusals:
        raise ConfigError(*map(_line, refusals))
    return "; ".join(map(_line, findings))


def _line(finding: Finding) -> str:
    if finding.outcome is Outcome.UNKNOWN:
        return f"it is not known {finding.message}: type the command again"
    host = "" if finding.subject == "storage" else f"host {finding.subject}: "
    return f"{host}{finding.message}: {finding.fix}"


def listening_ports(cluster: HostsCluster, facts: Iterable[HostFacts]) -> list[int]:
    """Ports of the file's range that no job has been given and nobody listens on, the last one first."""
    every = list(facts)
    taken = frozenset[int]().union(*(one.taken_ports for one in every))
    promised = {port + more for one in every for port in one.promised_ports for more in range(BLOCK)}
    first, last = cluster.port_range
    free = [port for port in range(last, first - 1, -1) if port not in taken]
    return [port for port in free if port not in promised] or free
