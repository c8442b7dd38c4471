"""What pods of the embedded cluster can count on: names, volumes, the Python environment, Pod Security."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.devcluster.host.layout import default_layout
from lockstep.devcluster.images import BASE
from support.clusters.own_cluster import GIVEN

Kubectl = Callable[..., subprocess.CompletedProcess[str]]
VOLUMES = {"w": "local-rwx", "python": "local-python"}

pytestmark = pytest.mark.usefixtures("embedded")


@pytest.fixture(scope="module")
def embedded(cluster: Path) -> None:
    """These are promises of the embedded cluster: another one is not asked for them."""
    if cluster != default_layout().kubeconfig:
        pytest.fail(f"{cluster} is not the embedded cluster's: unset {GIVEN} for these tests")


def claim(name: str, storage_class: str, mode: str) -> dict[str, Any]:
    spec = {"storageClassName": storage_class, "accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}


def pod(name: str, code: str, node: int, mounts: dict[str, str]) -> dict[str, Any]:
    """A pod as Pod Security `restricted` wants it, with user ids that own nothing on the volumes."""
    container = {
        "name": "main",
        "image": BASE,
        "command": ["/usr/bin/python3", "-c", code],
        "env": [{"name": "PYTHONPATH", "value": "/opt/lockstep/code:/opt/lockstep/site"}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in mounts.items()],
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "nodeSelector": {"kubernetes.io/hostname": default_layout().node(node).name},
        "securityContext": {"runAsNonRoot": True, "runAsUser": 12345 + node, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": volume, "persistentVolumeClaim": {"claimName": volume}} for volume in mounts],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": spec}


@pytest.fixture
def send(kubectl: Kubectl, namespace: str) -> Callable[..., None]:
    """Creates objects in a namespace that enforces Pod Security `restricted`."""
    kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")

    def create(*objects: dict[str, Any]) -> None:
        body = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        done = kubectl("-n", namespace, "create", "-f", "-", input=body)
        assert done.returncode == 0, done.stderr

    return create


def log_of(kubectl: Kubectl, namespace: str, name: str) -> str:
    """What the pod printed until it succeeded."""
    done = kubectl("-n", namespace, "wait", f"pod/{name}", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=180s")
    log = kubectl("-n", namespace, "logs", name).stdout
    assert done.returncode == 0, f"{done.stderr}\n{log}\n{kubectl('-n', namespace, 'describe', 'pod', name).stdout}"
    return log.strip()


def test_a_file_written_by_one_user_on_one_node_is_read_by_another_on_the_other(
    kubectl: Kubectl, namespace: str, send: Callable[..., None]
) -> None:
    send(claim("w", "local-rwx", "ReadWriteMany"))
    send(pod("writer", "open('/w/said', 'w').write('from node 0')", 0, {"w": "/w"}))
    log_of(kubectl, namespace, "writer")
    send(pod("reader", "print(open('/w/said').read())", 1, {"w": "/w"}))
    assert log_of(kubectl, namespace, "reader") == "from node 0"


def test_the_python_environment_is_importable_without_root_and_can_not_be_written(
    kubectl: Kubectl, namespace: str, send: Callable[..., None]
) -> None:
    code = (
        "import lockstep, lockstep_gang, lockstep_train, pydantic, os\n"
        "print(os.path.realpath(pydantic.__file__).startswith('/opt/lockstep/'), os.getuid())\n"
        "for folder in ('/opt/lockstep', '/opt/lockstep/code/lockstep'):\n"
        "    print(os.access(folder, os.W_OK))\n"
    )
    send(claim("python", "local-python", "ReadOnlyMany"), pod("x", code, 0, {"python": "/opt/lockstep"}))
    assert log_of(kubectl, namespace, "x").splitlines() == ["True 12345", "False", "False"]


def test_even_root_in_a_pod_can_not_change_the_environment_that_all_clusters_share(
    kubectl: Kubectl, namespace: str, send: Callable[..., None]
) -> None:
    kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=privileged", "--overwrite")
    code = (
        "try:\n    open('/opt/lockstep/mark', 'w').close(); print('written')\n"
        "except OSError as error:\n    print(error.strerror)\n"
    )  # fmt: skip
    body = pod("root", code, 1, {"python": "/opt/lockstep"})
    body["spec"]["securityContext"] = {"runAsUser": 0}
    send(claim("python", "local-python", "ReadOnlyMany"), body)
    assert log_of(kubectl, namespace, "root") == "Read-only file system"


def test_pods_of_both_nodes_find_each_other_by_the_names_of_a_headless_service(
    kubectl: Kubectl, namespace: str, send: Callable[..., None]
) -> None:
    serve = (
        "import socket\ns = socket.create_server(('', 8000))\n"
        "while True:\n    c, _ = s.accept(); c.sendall(b'hello'); c.close()\n"
    )  # fmt: skip
    ask = (
        "import socket, time\n"
        "for _ in range(100):\n    try:\n"
        f"        print(socket.create_connection(('server.peers.{namespace}.svc', 8000), timeout=5).recv(9).decode()); break\n"
        "    except OSError:\n        time.sleep(0.2)\n"
    )
    peers = {"clusterIP": "None", "selector": {"app": "server"}, "publishNotReadyAddresses": True, "ports": [{"port": 8000}]}
    server = pod("server", serve, 0, {})
    server["spec"] |= {"hostname": "server", "subdomain": "peers"}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "peers"}, "spec": peers}
    send(service, server, pod("client", ask, 1, {}))
    assert log_of(kubectl, namespace, "client") == "hello"


@pytest.mark.parametrize(("server_node", "client_node"), [(0, 0), (0, 1)], ids=["same node", "other node"])
def test_a_service_s_address_leads_to_its_pod(
    kubectl: Kubectl, namespace: str, send: Callable[..., None], server_node: int, client_node: int
) -> None:
    serve = (
        "import socket\ns = socket.create_server(('', 8000))\n"
        "while True:\n    c, _ = s.accept(); c.sendall(b'hello'); c.close()\n"
    )  # fmt: skip
    ask = (
        "import socket, time\n"
        "for _ in range(100):\n    try:\n"
        f"        print(socket.create_connection(('front.{namespace}', 80), timeout=2).recv(9).decode()); break\n"
        "    except OSError:\n        time.sleep(0.2)\n"
    )
    spec = {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8000}]}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "front"}, "spec": spec}
    send(service, pod("server", serve, server_node, {}), pod("client", ask, client_node, {}))
    assert log_of(kubectl, namespace, "client") == "hello"


def test_a_pod_that_pod_security_forbids_is_refused(kubectl: Kubectl, namespace: str, send: Callable[..., None]) -> None:
    body = pod("x", "pass", 0, {})
    body["spec"]["hostNetwork"] = True
    done = kubectl("-n", namespace, "create", "-f", "-", input=json.dumps(body))
    assert 'violates PodSecurity "restricted:latest"' in done.stderr


def test_the_data_of_a_claim_is_removed_with_it(kubectl: Kubectl, namespace: str, send: Callable[..., None]) -> None:
    send(claim("w", "local-rwx", "ReadWriteMany"))
    folder = default_layout().volumes / namespace / "w"
    assert kubectl("-n", namespace, "wait", "pvc/w", "--for=jsonpath={.status.phase}=Bound", "--timeout=180s").returncode == 0
    (folder / "data").write_text("x")
    kubectl("-n", namespace, "delete", "pvc", "w")
    deadline = time.monotonic() + 180
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()


def test_a_claim_made_again_under_the_same_name_starts_empty_and_keeps_its_data(
    kubectl: Kubectl, namespace: str, send: Callable[..., None]
) -> None:
    """The old volume's removal must not take the new claim's folder, which has the same name."""
    write = "import os; print(os.listdir('/w')); open('/w/kept', 'w').write('x')"
    for attempt in ("one", "two", "three"):
        send(claim("w", "local-rwx", "ReadWriteMany"), pod(attempt, write, 0, {"w": "/w"}))
        assert log_of(kubectl, namespace, attempt) == "[]"
        kubectl("-n", namespace, "delete", "pod", attempt)
        if attempt != "three":
            kubectl("-n", namespace, "delete", "pvc", "w")
    send(pod("last", "import os; print(os.listdir('/w'))", 1, {"w": "/w"}))
    assert log_of(kubectl, namespace, "last") == "['kept']"
