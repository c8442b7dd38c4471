"""Names, reachability and clocks."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep_gang.contract.preflight import Finding
from lockstep_gang.lifecycle.preflight.findings import Nodes, error, warning, where

SKEW_SECONDS = 1.0


def names(nodes: Nodes) -> Iterator[Finding]:
    for node, looked in nodes.looked.items():
        for address, why in looked.unresolved.items():
            fix = "look at the cluster's DNS and the job's headless Service"
            yield error("names", node, f"{where(nodes.run, node)} can't resolve {address} ({why})", fix)


def peers(nodes: Nodes) -> Iterator[Finding]:
    closed = [node for node, looked in nodes.looked.items() if not looked.port]
    for node in closed:
        yield error("peers", node, f"{where(nodes.run, node)} could not open a port", "look at its agent's log")
    for node, met in nodes.met.items():
        for other, why in met.unreachable.items():
            message = f"{where(nodes.run, node)} can't reach {where(nodes.run, int(other))}: {why}"
            yield error(
                "peers", node, message, "pods of one job must reach each other on all ports: look at network policies and firewalls"
            )


def clocks(nodes: Nodes) -> Iterator[Finding]:
    for node, skew in nodes.skews.items():
        if abs(skew) > SKEW_SECONDS:
            message = f"the clock of {where(nodes.run, node)} is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} node 0's"
            yield warning("clock", node, message, "let NTP or chrony set the node's clock: logs and tokens go by it")
