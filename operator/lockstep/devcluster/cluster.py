"""Bring the embedded cluster up, take it down, say how it is. `up` is also the repair: it starts what isn't running."""

from __future__ import annotations

import fcntl
import http
import shutil
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.devcluster import binary, cgroups, controlplane, images, network, node, processes, python_volume
from lockstep.devcluster.layout import Layout, NodeLayout
from lockstep.devcluster.provisioner import CLASSES, storage_class

Say = Callable[[str], None]
READY_TIMEOUT_SECONDS = 90.0
POLL_SECONDS = 0.1


class ClusterError(Exception):
    """The cluster did not come up or go away. The message says what is stuck and which log tells more."""


@dataclass(frozen=True)
class Wanted:
    """What `up` should reach: nodes, and extended resources by node (for every node under the key None).

    Resources that are not given are left as they are, so that an `up` for the sake of repair takes nothing away; none: an empty mapping.
    """

    nodes: int = 2
    resources: Mapping[int | None, Mapping[str, int]] | None = None

    def of_node(self, number: int) -> dict[str, int] | None:
        if self.resources is None:
            return None
        return {**self.resources.get(None, {}), **self.resources.get(number, {})}


@contextmanager
def _exclusive(layout: Layout) -> Iterator[None]:
    """One `up` or `down` of a cluster at a time."""
    layout.state.mkdir(parents=True, exist_ok=True)
    with (layout.state / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def wait(what: str, done: Callable[[], bool], log: Path | None = None, timeout_seconds: float = READY_TIMEOUT_SECONDS) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not done():
        if time.monotonic() > deadline:
            raise ClusterError(f"{what} did not happen in {timeout_seconds:.0f} s" + (f"; see {log}" if log else ""))
        time.sleep(POLL_SECONDS)


def up(layout: Layout, wanted: Wanted, say: Say) -> Path:
    """A cluster with `wanted.nodes` Ready nodes; the administrator's kubeconfig. Starts only what isn't running.

    Raises:
        ClusterError: something did not start; the message names its log.
    """
    with _exclusive(layout):
        programs = binary.build(layout.root, say)
        archives = [images.pause_archive(programs / binary.PAUSE, layout.root), images.base_archive(layout.root, say)]
        python_volume.publish_packages(layout.python_volume)
        python_volume.publish_code(layout.python_volume)
        nodes = [layout.node(number) for number in range(wanted.nodes)]
        _prepare(layout, nodes)
        with ThreadPoolExecutor() as pool:
            starting = [pool.submit(_start_runtime, n, archives, say) for n in nodes]
            _start_control_plane(layout, programs / binary.MULTI_CALL, say)
            for future in starting:
                future.result()
            for n in nodes:
                _start_kubelet(n, programs / binary.MULTI_CALL)
        _finish(layout, nodes, wanted, say)
    return layout.kubeconfig


def _prepare(layout: Layout, nodes: list[NodeLayout]) -> None:
    for folder in (layout.logs, layout.volumes, layout.run):
        folder.mkdir(parents=True, exist_ok=True)
    controlplane.write_credentials(layout)
    cgroups.create(f"lockstep-{layout.name}")
    network.create_bridge(layout)
    for n in nodes:
        cgroups.create(n.cgroup)
        network.create_node(n, nodes)
        node.write_files(n)


def _daemon(layout: Layout, name: str, command: list[str]) -> tuple[processes.Daemon, bool]:
    """The daemon, and whether it had to be started."""
    folder = layout.state / "daemons"
    running = processes.running(folder, name)
    if running:
        return running, False
    return processes.start(folder, name, command, layout.logs / f"{name}.log", cgroup=f"lockstep-{layout.name}"), True


def _start_control_plane(layout: Layout, kube: Path, say: Say) -> None:
    commands = controlplane.commands(layout, kube)
    started = [_daemon(layout, name, commands[name])[1] for name in ("etcd", "kube-apiserver")]
    wait("an answer of the API server", lambda: api_ready(layout), layout.logs / "kube-apiserver.log")
    if any(started):
        say("API server is ready")
    for name in ("kube-controller-manager", "kube-scheduler", "coredns", "provisioner"):
        _daemon(layout, name, commands[name])


def _start_runtime(n: NodeLayout, archives: list[Path], say: Say) -> None:
    name = f"{n.name}-containerd"
    _daemon(n.cluster, name, node.containerd_command(n))
    wait(f"an answer of containerd on {n.name}", lambda: node.answers(n), n.cluster.logs / f"{name}.log")
    held = node.image_names(n)
    for reference, archive in zip((images.PAUSE, images.BASE), archives, strict=True):
        mark = n.state / f"{reference.replace('/', '-')}.imported"
        if reference in held and mark.exists() and mark.read_text() == archive.name:
            continue
        say(f"importing {reference} into {n.name}")
        node.import_image(n, archive)
        mark.write_text(archive.name)


def _start_kubelet(n: NodeLayout, kube: Path) -> None:
    containerd = processes.running(n.cluster.state / "daemons", f"{n.name}-containerd")
    if containerd is None:
        raise ClusterError(f"containerd of {n.name} has ended; see {n.cluster.logs / f'{n.name}-containerd.log'}")
    kubelet = processes.running(n.cluster.state / "daemons", f"{n.name}-kubelet")
    if kubelet and not _same_mounts(kubelet.pid, containerd.pid):
        processes.stop(kubelet)  # it lives in the mount namespace of a containerd that is gone
    _daemon(n.cluster, f"{n.name}-kubelet", node.kubelet_command(n, kube, containerd.pid))
    _daemon(n.cluster, f"{n.name}-proxy", node.proxy_command(n, kube))


def _same_mounts(one: int, other: int) -> bool:
    return Path(f"/proc/{one}/ns/mnt").readlink() == Path(f"/proc/{other}/ns/mnt").readlink()


def api(layout: Layout) -> Any:
    from kubernetes import config

    return config.new_client_from_config(str(layout.kubeconfig))


def api_ready(layout: Layout) -> bool:
    """Whether the API server answers that it is ready."""
    context = ssl.create_default_context(cafile=str(layout.pki / "ca.crt"))
    context.load_cert_chain(layout.pki / "user-admin.crt", layout.pki / "user-admin.key")
    try:
        with urllib.request.urlopen(f"{layout.server}/readyz", timeout=2, context=context) as answer:  # noqa: S310 (always https)
            return bool(answer.status == http.HTTPStatus.OK)
    except OSError:
        return False


def _finish(layout: Layout, nodes: list[NodeLayout], wanted: Wanted, say: Say) -> None:
    from kubernetes import client

    connection = api(layout)
    core, storage = client.CoreV1Api(connection), client.StorageV1Api(connection)
    for name in CLASSES:
        _create_once(storage.create_storage_class, storage_class(name))
    names = {n.name for n in nodes}
    wait(f"nodes {', '.join(sorted(names))} Ready", lambda: names <= ready_nodes(core), layout.logs)
    for n in nodes:
        resources = wanted.of_node(n.number)
        if resources is not None:
            set_resources(core, n.name, resources)
    wait("the default service account", lambda: _exists(lambda: core.read_namespaced_service_account("default", "default")))
    say(f"nodes {', '.join(sorted(names))} are Ready")


def ready_nodes(core: Any) -> set[str]:
    def is_ready(item: Any) -> bool:
        return any(c.type == "Ready" and c.status == "True" for c in item.status.conditions or [])

    return {item.metadata.name for item in core.list_node().items if is_ready(item)}


def set_resources(core: Any, name: str, wanted: Mapping[str, int]) -> None:
    """Give the node these extended resources and take other ones of earlier calls away."""
    from kubernetes.client.exceptions import ApiException

    capacity = core.read_node(name).status.capacity
    changes: dict[str, str | None] = {key: None for key in capacity if "/" in key}
    changes.update({key: str(count) for key, count in wanted.items()})
    if {key: value for key, value in changes.items() if capacity.get(key) != value}:
        try:
            core.patch_node_status(name, {"status": {"capacity": changes, "allocatable": changes}})
        except ApiException as error:
            raise ClusterError(f"node {name} can't be given {wanted}: {error.body}") from error


def _create_once(create: Callable[[dict[str, Any]], Any], body: dict[str, Any]) -> None:
    from kubernetes.client.exceptions import ApiException

    try:
        create(body)
    except ApiException as error:
        if error.status != 409:
            raise


def _exists(read: Callable[[], Any]) -> bool:
    from kubernetes.client.exceptions import ApiException

    try:
        read()
    except ApiException as error:
        if error.status == 404:
            return False
        raise
    return True


def down(layout: Layout, say: Say, purge: bool = False) -> None:
    """Remove processes, groups, links, rules, sockets and the cluster's state. Images and the data of claims stay, unless purged."""
    with _exclusive(layout):
        cgroups.kill(f"lockstep-{layout.name}")
        cgroups.remove(f"lockstep-{layout.name}")
        network.remove(layout)
        shutil.rmtree(layout.run, ignore_errors=True)
        for path in (
            layout.run.parent,
            Path("/var/lib/cni"),
            Path("/var/lib/kubelet"),
            Path("/var/log/containers"),
            Path("/run/containerd"),
        ):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        kept = {"lock", "volumes", "nodes"}
        for path in layout.state.iterdir():
            if path.name not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for folder in sorted((layout.state / "nodes").glob("*")):
            _clear_node(folder)
        if purge:
            shutil.rmtree(layout.state)
    say(f"cluster {layout.name} is down")


def _clear_node(folder: Path) -> None:
    """Keep only the images and their marks."""
    for path in folder.iterdir():
        if path.name != "containerd" and path.suffix != ".imported":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def status(layout: Layout) -> dict[str, Any]:
    """What runs: daemons by name, nodes and whether they are Ready."""
    folder = layout.state / "daemons"
    daemons = {path.stem: processes.running(folder, path.stem) is not None for path in sorted(folder.glob("*.json"))}
    nodes: dict[str, bool] = {}
    if layout.kubeconfig.exists() and daemons.get("kube-apiserver") and api_ready(layout):
        from kubernetes import client

        core = client.CoreV1Api(api(layout))
        ready = ready_nodes(core)
        nodes = {item.metadata.name: item.metadata.name in ready for item in core.list_node().items}
    return {"name": layout.name, "kubeconfig": str(layout.kubeconfig), "daemons": daemons, "nodes": nodes}


def kubectl(layout: Layout, *arguments: str) -> subprocess.CompletedProcess[str]:
    """kubectl of the cluster's own binary, as administrator."""
    command = [str(binary.folder(layout.root) / binary.MULTI_CALL), "kubectl", "--kubeconfig", str(layout.kubeconfig), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


__all__ = ["ClusterError", "Wanted", "api", "down", "kubectl", "status", "up"]
