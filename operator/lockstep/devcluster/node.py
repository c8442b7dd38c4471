"""One node: containerd, kubelet and kube-proxy in the node's network namespace and a mount namespace of their own."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import yaml

from lockstep.devcluster.controlplane import CLUSTER_DOMAIN, component_kubeconfig
from lockstep.devcluster.host.layout import NodeLayout
from lockstep.devcluster.host.processes import TIED
from lockstep.devcluster.images import PAUSE
from lockstep_spec.files import write_durably

CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
PRIVATE_FOLDERS = ("/run/netns", "/run/containerd", "/var/lib/kubelet", "/var/lib/cni", "/var/log/containers")
"""Paths that these programs have compiled in: each node gets a folder of its own mounted there."""

ENTER = 'while [ "$1" != -- ]; do mount --bind "$1" "$2" || exit 1; shift 2; done; shift; exec "$@"'


def cni_folder() -> Path | None:
    return next((folder for folder in CNI_FOLDERS if (folder / "bridge").exists()), None)


def write_files(node: NodeLayout) -> None:
    from lockstep.devcluster.certificates import Authority

    for folder in (node.state, node.run, node.state / "cni", node.state / "log" / "pods"):
        folder.mkdir(parents=True, exist_ok=True)
    for path in PRIVATE_FOLDERS:
        _private(node, path).mkdir(parents=True, exist_ok=True)
        Path(path).mkdir(parents=True, exist_ok=True)
    (node.state / "resolv.conf").write_text("")
    (node.state / "containerd.toml").write_text(_containerd(node))
    write_once(node.state / "cni" / "10-bridge.conflist", json.dumps(pod_network_configuration(node)))
    (node.state / "kubelet.yaml").write_text(yaml.safe_dump(_kubelet(node)))
    authority = Authority(node.cluster.pki)
    authority.kubeconfig(
        node.state / "kubelet.kubeconfig", node.cluster.server, f"system:node:{node.name}", "system:nodes", context=node.cluster.name
    )


def write_once(path: Path, text: str) -> None:
    """Whole or not at all, and not when nothing changes: containerd watches the folder and reads what is half written."""
    if not path.exists() or path.read_text() != text:
        write_durably(path, text.encode())


def _private(node: NodeLayout, path: str) -> Path:
    base = node.run if path.startswith("/run") else node.state
    return base / "private" / path.strip("/").replace("/", "-")


def _containerd(node: NodeLayout) -> str:
    return f"""version = 2
root = "{node.state / "containerd"}"
state = "{node.run / "containerd"}"
[grpc]
  address = "{node.containerd_socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni_folder()}"
    conf_dir = "{node.state / "cni"}"
"""


def pod_network_configuration(node: NodeLayout) -> dict[str, object]:
    """MTU of eth0 in every pod."""
    ipam = {
        "type": "host-local", "dataDir": str(node.run / "addresses"),
        "ranges": [[{"subnet": node.pod_network}]], "routes": [{"dst": "0.0.0.0/0"}],
    }  # fmt: skip
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "hairpinMode": True, "ipam": ipam}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}]}


def _kubelet(node: NodeLayout) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{node.containerd_socket}",
        "clusterDNS": [node.cluster.gateway],
        "clusterDomain": CLUSTER_DOMAIN,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.cgroup}",
        "failSwapOn": False,
        "failCgroupV1": False,
        "resolvConf": str(node.state / "resolv.conf"),
        "podLogsDir": str(node.state / "log" / "pods"),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(node.cluster.pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%", "nodefs.inodesFree": "1%"},
        "localStorageCapacityIsolation": False,
        "nodeStatusUpdateFrequency": "5s",
        "syncFrequency": "10s",
    }


def containerd_command(node: NodeLayout) -> list[str]:
    """containerd as the holder of the node's mount namespace, in which the kubelet joins it."""
    binds = [part for path in PRIVATE_FOLDERS for part in (str(_private(node, path)), path)]
    return [
        "nsenter", f"--net=/run/netns/{node.namespace}", "unshare", "--mount", "--propagation", "private",
        "/bin/sh", "-c", ENTER, "enter", *binds, "--", "containerd", "--config", str(node.state / "containerd.toml"), "--log-level", "warn",
    ]  # fmt: skip


def kubelet_command(node: NodeLayout, kube: Path, containerd_pid: int) -> list[str]:
    return [
        "nsenter", f"--target={containerd_pid}", "--mount", "--net", str(kube), "kubelet", f"--config={node.state / 'kubelet.yaml'}",
        f"--kubeconfig={node.state / 'kubelet.kubeconfig'}", f"--hostname-override={node.name}", f"--root-dir={node.state / 'kubelet'}",
        f"--cert-dir={node.state / 'kubelet-pki'}", f"--node-ip={node.address}",
    ]  # fmt: skip


def mount_python(node: NodeLayout, containerd_pid: int) -> None:
    """Show the node the Python environment, which all clusters and the host share, so that not even root in a pod can write to it."""
    script = 'mountpoint -q "$1" || { mount --bind "$0" "$1" && mount -o remount,bind,ro "$1"; }'
    source = str(node.cluster.python_volume)
    run_inside(node, containerd_pid, f"mount {source}", script, source, str(node.cluster.python_mount))


def run_inside(node: NodeLayout, containerd_pid: int, what: str, script: str, zeroth: str, first: str) -> None:
    """Run a script of mounts where the node's containerd sees them. Raises RuntimeError, which says `what` can't be done."""
    command = ["nsenter", f"--target={containerd_pid}", "--mount", "/bin/sh", "-c", script, zeroth, first]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"node {node.name} can't {what}: {done.stderr.strip()}")


def proxy_command(node: NodeLayout, kube: Path) -> list[str]:
    return [
        "nsenter", f"--net=/run/netns/{node.namespace}", str(kube), "kube-proxy",
        f"--kubeconfig={component_kubeconfig(node.cluster, 'system:kube-proxy')}", "--proxy-mode=iptables",
        f"--cluster-cidr={node.cluster.pod_network}", f"--hostname-override={node.name}", "--conntrack-max-per-core=0",
        "--healthz-bind-address=", "--metrics-bind-address=127.0.0.1:10249",
    ]  # fmt: skip


def image_names(node: NodeLayout) -> set[str]:
    """Images that this node's containerd holds; empty while it doesn't answer."""
    done = subprocess.run([*ctr(node), "images", "list", "--quiet"], capture_output=True, text=True, check=False)
    return set(done.stdout.split())


def answers(node: NodeLayout) -> bool:
    """Return True if the node's containerd takes connections, which it does when it has loaded everything."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        return connection.connect_ex(str(node.containerd_socket)) == 0


def import_image(node: NodeLayout, archive: Path) -> None:
    done = subprocess.run([*ctr(node), "images", "import", str(archive)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"node {node.name} can't import {archive}: {done.stderr.strip()}")


def ctr(node: NodeLayout) -> list[str]:
    return [*TIED, "ctr", "--address", str(node.containerd_socket), "--namespace", "k8s.io"]
