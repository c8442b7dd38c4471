"""Files into claims and programs beside them: a short-lived pod that mounts the claims and asks for no GPU."""

from __future__ import annotations

import hashlib
import io
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.api.errors import Failed
from lockstep.api.names import APP, CONTAINER, LABEL_MANAGED_BY, LABEL_NAME, key_secret_name
from lockstep.kube.client import Client
from lockstep.kube.cluster import CONFLICT, NOT_FOUND, ApiError
from lockstep.kube.exec import Place, output_of
from lockstep.kube.kinds import path_of
from lockstep.plan.render.objects import claims
from lockstep.plan.render.pod import pod_template
from lockstep.plan.render.resolve import Resolved
from lockstep.plan.render.security import container_security_context

READY_TIMEOUT_SECONDS = 120.0
LIFETIME_SECONDS = 3600
"""Of a pod that nobody removed."""
PROGRAM_SECONDS = 600.0
POLL_SECONDS = 0.2
FILES = "files"

# Run in the pod by its own Python: takes exactly `size` bytes of tar from standard input, checks them, then unpacks. What it makes is the group's, too.
RECEIVE = """
import hashlib, io, os, stat, sys, tarfile
size, digest, target = int(sys.argv[1]), sys.argv[2], sys.argv[3]
data = sys.stdin.buffer.read(size)
if hashlib.sha256(data).hexdigest() != digest:
    sys.exit(f"received {len(data)} of {size} bytes, or they were changed on the way")
os.umask(0o002)
os.makedirs(target, exist_ok=True)
with tarfile.open(fileobj=io.BytesIO(data)) as archive:
    names = archive.getnames()
    archive.extractall(target, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
for name in names:
    path = os.path.join(target, name)
    mode = os.lstat(path).st_mode
    shared = 0o070 if stat.S_ISDIR(mode) else 0o060
    if not stat.S_ISLNK(mode) and mode & shared != shared:
        os.chmod(path, stat.S_IMODE(mode) | shared)
"""


class PodError(Failed):
    """The pod did not come up. The message says why."""


def files_pod(name: str, resolved: Resolved) -> dict[str, Any]:
    """A pod with the claims, rights and environment of the job's pods, which runs nothing and asks for no GPU."""
    spec = pod_template(resolved, resolved.image, key_secret_name(resolved.name), reports=False)["spec"]
    trainer = next(c for c in spec["containers"] if c["name"] == CONTAINER)
    own = {volume["name"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume or "emptyDir" in volume}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {LABEL_NAME: f"{APP}-files", LABEL_MANAGED_BY: APP}},
        "spec": {
            "containers": [
                {
                    "name": FILES,
                    "image": trainer["image"],
                    "command": ["python3", "-c", "import signal; signal.signal(signal.SIGTERM, lambda *a: exit()); signal.pause()"],
                    "env": [variable for variable in trainer["env"] if "value" in variable],
                    "volumeMounts": [mount for mount in trainer["volumeMounts"] if mount["name"] in own],
                    "securityContext": container_security_context(resolved.profile.spec),
                    "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
                }
            ],
            "volumes": [volume for volume in spec["volumes"] if volume["name"] in own],
            "securityContext": spec["securityContext"],
            "serviceAccountName": spec["serviceAccountName"],
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": LIFETIME_SECONDS,
            "terminationGracePeriodSeconds": 1,
        }
        | {key: spec[key] for key in ("tolerations", "imagePullSecrets") if key in spec},
    }


def ensure_claims(client: Client, resolved: Resolved) -> None:
    """Create the claims that the job will mount, where they are missing."""
    for claim in claims(resolved):
        try:
            client.request("POST", path_of("PersistentVolumeClaim", resolved.namespace), claim)
        except ApiError as error:
            if error.status != CONFLICT:
                raise


@contextmanager
def running_pod(client: Client, namespace: str, pod: dict[str, Any]) -> Iterator[Place]:
    """The pod's container, running; removed at the end whatever happens.

    Raises:
        PodError: it is not Running after two minutes; the message has the pod's own words.
    """
    name = pod["metadata"]["name"]
    _delete(client, namespace, name)
    client.request("POST", path_of("Pod", namespace), pod)
    try:
        _wait_running(client, namespace, name)
        yield Place(namespace, name, FILES)
    finally:
        _delete(client, namespace, name)


def _wait_running(client: Client, namespace: str, name: str) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_SECONDS
    while True:
        status = client.request("GET", path_of("Pod", namespace, name))["status"]
        if status["phase"] == "Running":
            return
        if status["phase"] in ("Failed", "Succeeded") or time.monotonic() > deadline:
            raise PodError(f"pod {namespace}/{name} is {status['phase']} and not Running: {_why(status)}")
        time.sleep(POLL_SECONDS)


def _why(status: dict[str, Any]) -> str:
    """The first reason that the kubelet or the scheduler gives."""
    for container in status.get("containerStatuses") or []:
        waiting = (container.get("state") or {}).get("waiting")
        if waiting:
            return f"{waiting['reason']}: {waiting.get('message') or ''}"
    messages = [c["message"] for c in status.get("conditions") or [] if c["status"] != "True" and c.get("message")]
    return messages[0] if messages else "the cluster gives no reason"


def _delete(client: Client, namespace: str, name: str) -> None:
    path, deadline = path_of("Pod", namespace, name), time.monotonic() + READY_TIMEOUT_SECONDS
    try:
        client.request("DELETE", path, {"gracePeriodSeconds": 0})
        while time.monotonic() < deadline:
            client.request("GET", path)
            time.sleep(POLL_SECONDS)
    except ApiError as error:
        if error.status == NOT_FOUND:
            return
        raise
    raise PodError(f"pod {namespace}/{name} is still there {READY_TIMEOUT_SECONDS:.0f} s after its deletion")


def run_in_pod(client: Client, place: Place, command: list[str], stdin: bytes = b"") -> str:
    """Run a program in the pod and return what it printed on standard output, as text. Raises ProgramFailed."""
    output = client.run(lambda cluster: output_of(cluster, place, command, stdin=stdin, seconds=PROGRAM_SECONDS))
    return output.decode(errors="replace")


def send_folder(client: Client, place: Place, source: Path, target: str) -> int:
    """Copy everything under `source` to the folder `target` in the pod, checked by SHA-256. Returns the bytes sent."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(source.iterdir()):
            archive.add(path, arcname=path.name)
    data = buffer.getvalue()
    digest = hashlib.sha256(data).hexdigest()
    run_in_pod(client, place, ["python3", "-c", RECEIVE, str(len(data)), digest, target], stdin=data)
    return len(data)
