"""Bring the embedded cluster up, take it down, say how it is. `up` is also the repair: it starts what isn't running."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lockstep.api.errors import ConfigError, Failed
from lockstep.devcluster import binary, controlplane, images, node, provisioner, python_volume, rails, server
from lockstep.devcluster.host import cgroups, machine, network, processes
from lockstep.devcluster.host.layout import Layout, NodeLayout

Say = Callable[[str], None]
READY_TIMEOUT_SECONDS = 90.0
POLL_SECONDS = 0.1
KEPT = {"lock", "starting", "volumes", "nodes"}
"""Entries of the state folder that `down` keeps: the locks, the data of claims, and of the nodes only the images."""


class ClusterError(Failed):
    """The cluster did not come up or go away. The message says what is stuck and which log tells more."""


@dataclass(frozen=True)
class ClusterGoal:
    """The state that `up` should reach: nodes, and extended resources by node (for every node under the key None).

    Resources that are not given are left as they are, so that an `up` for the sake of repair takes nothing away; none: an empty mapping.
    """

    nodes: int = 2
    resources: Mapping[int | None, Mapping[str, int]] | None = None
    rails: int | None = None
    """Further networks of every node, with Multus and a pretended device each; None: as they are."""

    def of_node(self, number: int) -> dict[str, int] | None:
        """With rails, and no resources given: every node has one of each rail's devices."""
        if self.resources is None:
            return rails.resources(self.rails) if self.rails is not None else None
        return {**self.resources.get(None, {}), **self.resources.get(number, {})}


RESOURCE = re.compile(r"^(?:(\d+):)?([a-z0-9][-a-z0-9.]*/[A-Za-z0-9][-A-Za-z0-9_.]*)=(\d+)$")


def parse_resources(texts: Sequence[str], nodes: int) -> Mapping[int | None, Mapping[str, int]]:
    """Pretended resources of nodes, as the command line writes them: `nvidia.com/gpu=4` is for every node (key None), `1:nvidia.com/gpu=4`
    for node 1.

    Raises:
        ConfigError: not of that form, or there is no such node.
    """
    resources: dict[int | None, dict[str, int]] = {}
    for text in texts:
        match = RESOURCE.match(text)
        if match is None:
            raise ConfigError(f"--resource {text}: must be domain/name=count, or node:domain/name=count, for example nvidia.com/gpu=4")
        number, name, count = match.groups()
        if number is not None and int(number) >= nodes:
            raise ConfigError(f"--resource {text}: there is no node {number}; nodes are 0 to {nodes - 1}")
        resources.setdefault(None if number is None else int(number), {})[name] = int(count)
    return resources


def _wait(layout: Layout, what: str, done: Callable[[], bool], *daemons: str) -> None:
    """Wait until it is so.

    Raises:
        ClusterError: it takes too long, or a daemon that it depends on has ended.
    """
    deadline = time.monotonic() + READY_TIMEOUT_SECONDS
    while not done():
        for name in daemons:
            if processes.running(layout.daemons, name) is None:
                log = layout.log(name)
                raise ClusterError(f"{name} has ended: {machine.too_few_instances(log) or _last_line(log)} (see {log})")
        if time.monotonic() > deadline:
            logs = " and ".join(str(layout.log(name)) for name in daemons) or str(layout.logs)
            raise ClusterError(f"{what} did not happen in {READY_TIMEOUT_SECONDS:.0f} s; see {logs}")
        time.sleep(POLL_SECONDS)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else "it said nothing"


def up(layout: Layout, goal: ClusterGoal, say: Say) -> Path:
    """Bring up a cluster with `goal.nodes` Ready nodes and return the administrator's kubeconfig. Starts only what isn't running as it
    should.

    Raises:
        ClusterError: something did not start; the message names its log.
    """
    with processes.exclusive(layout.state, layout.starting):
        rail_count = rails.recorded(layout) if goal.rails is None else goal.rails
        programs, archives = prepare(layout, say)
        plugins = node.cni_folder()
        cni = binary.build_multus(layout.root, plugins, say) if rail_count and plugins is not None else None
        nodes = [layout.node(number) for number in range(goal.nodes)]
        _lay_out(layout, nodes)
        with ThreadPoolExecutor() as pool:
            starting = [pool.submit(_start_runtime, n, archives, say) for n in nodes]
            _start_control_plane(layout, programs / binary.MULTI_CALL, say)
            for future in starting:
                future.result()
            began = datetime.now(UTC)
            started = {n.name: began for n in nodes if _start_kubelet(n, programs / binary.MULTI_CALL)}
            _reach_rails(layout, nodes, rail_count, cni)
        _finish(layout, nodes, goal, started, say)
    return layout.kubeconfig


def prepare(layout: Layout, say: Say) -> tuple[Path, list[Path]]:
    """Build what all clusters of this machine share: the programs' folder, the images, and the packages that pods import.

    Raises:
        BuildError: the Go command failed.
        RuntimeError: the base image could not be made.
        ConfigError: pods could not see the packages.
    """
    with processes.shared_things(layout.root):
        python_volume.publish_packages(layout.python_volume)  # first: it refuses what minutes of building wouldn't mend
        python_volume.publish_code(layout.python_volume)
        programs = binary.build(layout.root, say)
        archives = [images.pause_archive(programs / binary.PAUSE, layout.root), images.base_archive(layout.root, say)]
    return programs, archives


def _lay_out(layout: Layout, nodes: list[NodeLayout]) -> None:
    for folder in (layout.logs, layout.volumes, layout.python_mount, layout.run):
        folder.mkdir(parents=True, exist_ok=True)
    machine.note_settings(layout.sysctls)
    cgroups.create_tracking(layout.cgroup)  # first: it is how the `down` of another cluster knows of this one
    controlplane.write_credentials(layout)
    network.create_bridge(layout.bridge, layout.gateway)
    network.let_through(layout)
    for n in nodes:
        cgroups.create(n.cgroup)
        network.create_node(n, nodes)
        node.write_files(n)


def _daemon(layout: Layout, name: str, command: list[str], *leftovers: str) -> bool:
    """Start the daemon unless it runs with this command line; return True if it had to be started. `leftovers`: control groups of what an
    earlier one has left running, which is killed then.
    """
    running = processes.running(layout.daemons, name)
    if running and running.command == processes.digest(command):
        return False
    cgroups.kill(*leftovers)
    if running:
        processes.stop(running)
    processes.start(layout.daemons, name, command, layout.log(name), f"{layout.cgroup}/{name}", layout.starting)
    return True


def _start_control_plane(layout: Layout, kube: Path, say: Say) -> None:
    commands = controlplane.commands(layout, kube)
    started = [_daemon(layout, name, commands[name]) for name in ("etcd", "kube-apiserver")]
    _wait(layout, "an answer of the API server", lambda: server.is_ready(layout), "etcd", "kube-apiserver")
    if any(started):
        say("API server is ready")
    for name in ("kube-controller-manager", "kube-scheduler", "coredns", "provisioner"):
        _daemon(layout, name, commands[name])


def _start_runtime(n: NodeLayout, archives: list[Path], say: Say) -> None:
    name, command = f"{n.name}-containerd", node.containerd_command(n)
    _daemon(n.cluster, name, command, n.cgroup)  # ends the containers that an earlier runtime has left
    _wait(n.cluster, f"an answer of containerd on {n.name}", lambda: node.answers(n), name)
    imported = node.image_names(n)
    for reference, archive in zip((images.PAUSE, images.BASE), archives, strict=True):
        mark = n.state / f"{reference.replace('/', '-')}.imported"
        if reference in imported and mark.exists() and mark.read_text() == archive.name:
            continue
        say(f"importing {reference} into {n.name}")
        node.import_image(n, archive)
        mark.write_text(archive.name)


def _start_kubelet(n: NodeLayout, kube: Path) -> bool:
    """Start the node's kubelet and kube-proxy; return True if the kubelet had to be started."""
    layout, runtime = n.cluster, f"{n.name}-containerd"
    containerd = processes.running(layout.daemons, runtime)
    if containerd is None:
        raise ClusterError(f"{runtime} has ended: {_last_line(layout.log(runtime))} (see {layout.log(runtime)})")
    node.mount_python(n, containerd.pid)
    started = _daemon(layout, f"{n.name}-kubelet", node.kubelet_command(n, kube, containerd.pid))
    _daemon(layout, f"{n.name}-proxy", node.proxy_command(n, kube))
    return started


def _reach_rails(layout: Layout, nodes: list[NodeLayout], count: int, cni: Path | None) -> None:
    """Rails laid and attached, or taken up: also after a containerd that has ended took its mounts along."""
    before = rails.recorded(layout)
    if not count and not before:
        return
    rails.record(layout, max(count, before))  # an `up` that is killed halfway is mended by the next one
    if cni is not None:
        rails.lay(layout, nodes, count)
    for n in nodes:
        runtime = processes.running(layout.daemons, f"{n.name}-containerd")
        if runtime is not None and cni is not None:
            rails.attach(n, runtime.pid, cni)
        elif runtime is not None:
            rails.detach(n, runtime.pid)
    client = provisioner.administrator(layout)
    if cni is not None:
        server.create_attachments(client, layout, count)
    else:  # the kind, and with it all of them
        client.run(lambda cluster: cluster.delete("CustomResourceDefinition", None, rails.definition()["metadata"]["name"]))
        rails.take_up(layout, nodes)
    rails.record(layout, count)


def _finish(layout: Layout, nodes: list[NodeLayout], goal: ClusterGoal, started: Mapping[str, datetime], say: Say) -> None:
    """`started`: when kubelets were started just now, by node; what stood in their nodes' status before is no news of them."""
    names = ", ".join(n.name for n in nodes)
    kubelets = [f"{n.name}-kubelet" for n in nodes]
    client = provisioner.administrator(layout)
    server.create_classes(client)
    _wait(layout, f"nodes {names} Ready", lambda: all(server.node_readiness(client, started).get(n.name) for n in nodes), *kubelets)
    for n in nodes:
        resources = goal.of_node(n.number)
        if resources is not None:
            server.set_resources(client, n.name, resources)
    _wait(layout, "the default service account", lambda: server.has_default_account(client), "kube-controller-manager")
    say(f"nodes {names} are Ready")


def down(layout: Layout, say: Say, purge: bool = False) -> None:
    """Remove processes, groups, links, rules, sockets and the cluster's state. Images and the data of claims stay, unless purged."""
    with processes.exclusive(layout.state, layout.starting):
        cgroups.remove(*cgroups.of_cluster(layout.name))
        network.remove_all(f"lk{layout.index}", layout.bridge)
        network.remove_rules(layout)
        machine.restore_settings(layout.sysctls)
        shutil.rmtree(layout.run, ignore_errors=True)
        if not cgroups.others(layout.name):  # one that is just coming up needs them, too
            network.forget_namespaces()
            machine.remove_unused([layout.run.parent, *map(Path, node.PRIVATE_FOLDERS)])
        if layout.python_mount.exists():
            layout.python_mount.rmdir()  # never its content: that would be the cache
        machine.clear(layout.state, lambda path: path.name in KEPT)
        for folder in sorted((layout.state / "nodes").glob("*")):  # of which the images stay, and their marks
            machine.clear(folder, lambda path: path.name == "containerd" or path.suffix == ".imported")
        if purge:
            shutil.rmtree(layout.state)
    say(f"cluster {layout.name} is down")


def status(layout: Layout) -> dict[str, Any]:
    """Daemons by name and nodes by readiness, as `lockstep devcluster status` prints them."""
    daemons = {path.stem: processes.running(layout.daemons, path.stem) is not None for path in sorted(layout.daemons.glob("*.json"))}
    nodes: dict[str, bool] = {}
    if daemons.get("kube-apiserver") and server.is_ready(layout):
        nodes = server.node_readiness(provisioner.administrator(layout))
    return {"name": layout.name, "kubeconfig": str(layout.kubeconfig), "daemons": daemons, "nodes": nodes}


def kubectl(layout: Layout, *arguments: str) -> subprocess.CompletedProcess[str]:
    """kubectl of the cluster's own binary, as administrator."""
    command = [str(binary.folder(layout.root) / binary.MULTI_CALL), "kubectl", "--kubeconfig", str(layout.kubeconfig), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)
