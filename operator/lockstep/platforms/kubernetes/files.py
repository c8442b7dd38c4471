"""Files into claims and programs beside them: a short-lived pod that mounts the claims and asks for no GPU."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lockstep.api.errors import Failed
from lockstep.api.names import APP, CONTAINER, LABEL_MANAGED_BY, LABEL_NAME
from lockstep.plan.objects import claims
from lockstep.plan.pod import pod_template
from lockstep.plan.resolve import Resolved
from lockstep.plan.security import container_security_context

READY_TIMEOUT_SECONDS = 120.0
POLL_SECONDS = 0.2

# Run in the pod by its own Python: takes exactly `size` bytes of tar from standard input, checks them, then unpacks.
RECEIVE = """
import hashlib, io, sys, tarfile
size, digest, target = int(sys.argv[1]), sys.argv[2], sys.argv[3]
data = sys.stdin.buffer.read(size)
if hashlib.sha256(data).hexdigest() != digest:
    sys.exit(f"received {len(data)} of {size} bytes, or they were changed on the way")
with tarfile.open(fileobj=io.BytesIO(data)) as archive:
    archive.extractall(target, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
"""


class PodError(Failed):
    """The pod did not come up, or a program in it failed. The message says which and why."""


def files_pod(name: str, resolved: Resolved) -> dict[str, Any]:
    """A pod with the claims, rights and environment of the job's pods, which runs nothing and asks for no GPU."""
    spec = pod_template(resolved, resolved.image, reports=False)["spec"]
    trainer = next(c for c in spec["containers"] if c["name"] == CONTAINER)
    own = {volume["name"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume or "emptyDir" in volume}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {LABEL_NAME: f"{APP}-files", LABEL_MANAGED_BY: APP}},
        "spec": {
            "containers": [
                {
                    "name": "files",
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
            "terminationGracePeriodSeconds": 1,
        },
    }


def ensure_claims(core: Any, resolved: Resolved) -> None:
    """Create the claims that the job will mount, where they are missing."""
    from kubernetes.client.exceptions import ApiException

    for claim in claims(resolved):
        try:
            core.create_namespaced_persistent_volume_claim(resolved.namespace, claim)
        except ApiException as error:
            if error.status != 409:
                raise


@contextmanager
def running_pod(core: Any, namespace: str, pod: dict[str, Any]) -> Iterator[str]:
    """The pod, Running, under its name; removed at the end whatever happens.

    Raises:
        PodError: it is not Running after two minutes; the message has the pod's own words.
    """
    name = pod["metadata"]["name"]
    _delete(core, namespace, name)
    core.create_namespaced_pod(namespace, pod)
    try:
        _wait_running(core, namespace, name)
        yield name
    finally:
        _delete(core, namespace, name)


def _wait_running(core: Any, namespace: str, name: str) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_SECONDS
    while True:
        status = core.read_namespaced_pod(name, namespace).to_dict()["status"]
        if status["phase"] == "Running":
            return
        if status["phase"] in ("Failed", "Succeeded") or time.monotonic() > deadline:
            raise PodError(f"pod {namespace}/{name} is {status['phase']} and not Running: {_why(status)}")
        time.sleep(POLL_SECONDS)


def _why(status: dict[str, Any]) -> str:
    """The first reason that the kubelet or the scheduler gives."""
    for container in status.get("container_statuses") or []:
        waiting = (container.get("state") or {}).get("waiting")
        if waiting:
            return f"{waiting['reason']}: {waiting.get('message') or ''}"
    messages = [c["message"] for c in status.get("conditions") or [] if c["status"] != "True" and c.get("message")]
    return messages[0] if messages else "the cluster gives no reason"


def _delete(core: Any, namespace: str, name: str) -> None:
    from kubernetes.client.exceptions import ApiException

    try:
        core.delete_namespaced_pod(name, namespace, grace_period_seconds=0)
    except ApiException as error:
        if error.status != 404:
            raise
        return
    deadline = time.monotonic() + READY_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        try:
            core.read_namespaced_pod(name, namespace)
        except ApiException as error:
            if error.status == 404:
                return
            raise
        time.sleep(POLL_SECONDS)
    raise PodError(f"pod {namespace}/{name} is still there {READY_TIMEOUT_SECONDS:.0f} s after its deletion")


def run_in_pod(core: Any, namespace: str, name: str, command: list[str], stdin: bytes = b"") -> str:
    """Run a program in the pod and return what it printed on standard output, as text. Raises as `output_of` does."""
    return output_of(core, namespace, name, command, stdin).decode(errors="replace")


def output_of(core: Any, namespace: str, name: str, command: list[str], stdin: bytes = b"") -> bytes:
    """Run a program in the pod's first container and return what it printed on standard output.

    Raises:
        PodError: it ended with an error; the message has the last lines of its standard error.
    """
    from kubernetes.stream import stream

    session = stream(
        core.connect_get_namespaced_pod_exec, name, namespace, command=command,
        stdin=bool(stdin), stdout=True, stderr=True, tty=False, _preload_content=False, binary=True,
    )  # fmt: skip
    output, errors = [], []
    with ExitStack() as at_end:
        at_end.callback(session.sock.shutdown)  # close() leaves the socket open when the peer closed first
        at_end.callback(session.close)
        for start in range(0, len(stdin), 1 << 20):
            session.write_stdin(stdin[start : start + (1 << 20)])
        while session.is_open():
            session.update(timeout=1)
            output.append(session.read_stdout() if session.peek_stdout() else b"")
            errors.append(session.read_stderr() if session.peek_stderr() else b"")
    code = session.returncode
    if code != 0:
        tail = b"".join(errors).decode(errors="replace").strip().splitlines()[-5:]
        raise PodError(f"{command[0]} in pod {namespace}/{name} ended with {code}: {' | '.join(tail) or json.dumps(command[:3])}")
    return b"".join(output)


def send_folder(core: Any, namespace: str, name: str, source: Path, target: str) -> int:
    """Copy everything under `source` to the folder `target` in the pod, checked by SHA-256. Returns the bytes sent."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(source.iterdir()):
            archive.add(path, arcname=path.name)
    data = buffer.getvalue()
    digest = hashlib.sha256(data).hexdigest()
    run_in_pod(core, namespace, name, ["python3", "-c", RECEIVE, str(len(data)), digest, target], stdin=data)
    return len(data)
