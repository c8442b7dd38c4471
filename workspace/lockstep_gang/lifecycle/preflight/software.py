"""What ranks of all nodes must have alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lockstep_gang.contract.preflight import Finding
from lockstep_gang.lifecycle.preflight.findings import Nodes, error, odd, warning, where

_SAME = ("torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "deepspeed")
"""Libraries whose messages to each other change between versions."""


def python(nodes: Nodes) -> Iterator[Finding]:
    values = {node: looked.versions.get("python", "") for node, looked in nodes.looked.items() if looked.versions}
    for node, seen, common in odd(values):
        message = f"Python is {seen} on {where(nodes.run, node)} and {common} on other nodes"
        yield warning("python", node, message, "use one image on all nodes")


def libraries(nodes: Nodes) -> Iterator[Finding]:
    names = sorted({name for looked in nodes.looked.values() for name in looked.versions if name != "python"})
    for name in names:
        values = {node: looked.versions.get(name, "") for node, looked in nodes.looked.items() if looked.versions}
        for node, seen, common in odd(values):
            message = f"{name} is {seen or 'not installed'} on {where(nodes.run, node)} and {common or 'not installed'} on other nodes"
            fix = "use one image on all nodes, and install nothing in pods"
            yield (
                replace(error("libraries", node, message, fix), final=True) if name in _SAME else warning("libraries", node, message, fix)
            )


def environment(nodes: Nodes) -> Iterator[Finding]:
    names = sorted({name for looked in nodes.looked.values() for name in looked.environment})
    for name in names:
        values = {n: looked.environment.get(name, "") for n, looked in nodes.looked.items() if "environment" not in looked.unfinished}
        for node, seen, common in odd(values):
            message = f"{name} is {_quoted(seen)} on {where(nodes.run, node)} and {_quoted(common)} on other nodes"
            yield warning("environment", node, message, "set it in the job or in the cluster, for all nodes")


def _quoted(value: str) -> str:
    return repr(value[:100]) if value else "not set"
