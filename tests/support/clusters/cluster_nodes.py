"""A third node of the embedded cluster, for tests that lose one."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from kubernetes import client

from lockstep.devcluster import cluster
from lockstep.devcluster.host import cgroups, processes
from lockstep.devcluster.host.layout import NodeLayout, default_layout


@contextmanager
def third_node(core: client.CoreV1Api) -> Iterator[NodeLayout]:
    """A Ready node more, until the end of the block; then there are two again, whatever became of it."""
    layout = default_layout()
    node = layout.node(2)
    try:
        cluster.up(layout, cluster.ClusterGoal(nodes=3), print)
        yield node
    finally:
        _remove(core, node)


def cut_power(node: NodeLayout) -> None:
    """Nothing of the node does or says anything any more, and nobody is told: no connection is closed."""
    subprocess.run(["ip", "link", "set", node.link, "down"], check=True)
    for _ in range(2):  # a second time for what was being started
        for pid in cgroups.processes(*_groups(node)):
            try:
                os.kill(pid, signal.SIGSTOP)
            except ProcessLookupError:
                continue


def _groups(node: NodeLayout) -> list[str]:
    return [node.cgroup, *(f"{node.cluster.cgroup}/{name}" for name in _daemons(node))]


def _daemons(node: NodeLayout) -> list[str]:
    return [f"{node.name}-{program}" for program in ("kubelet", "proxy", "containerd")]


def _remove(core: client.CoreV1Api, node: NodeLayout) -> None:
    cgroups.remove(*_groups(node))
    for name in _daemons(node):
        processes.record(node.cluster.daemons, name).unlink(missing_ok=True)
    for words in (["ip", "link", "delete", node.link], ["ip", "netns", "delete", node.namespace]):
        subprocess.run(words, capture_output=True, check=False)  # the kernel may have taken a dead namespace's link away
    try:
        core.delete_node(node.name)
    except client.ApiException as error:
        if error.status != 404:
            raise
