"""Requests to the cluster's API server: its readiness and the nodes', storage classes, pretended resources."""

from __future__ import annotations

import http
import ssl
import time
import urllib.request
from collections.abc import Mapping
from datetime import datetime

from lockstep.api.objects import Object, condition
from lockstep.devcluster.host.layout import Layout
from lockstep.devcluster.provisioner import CLASSES, storage_class
from lockstep.devcluster.rails import attachment, definition
from lockstep.kube.cluster import MERGE, NOT_FOUND, Client, tolerated
from lockstep.kube.kinds import path_of

SERVED_SECONDS = 20.0
"""For a new kind to be served."""


def is_ready(layout: Layout) -> bool:
    """Return True if the API server answers that it is ready."""
    try:
        context = ssl.create_default_context(cafile=str(layout.pki / "ca.crt"))
        context.load_cert_chain(layout.pki / "user-admin.crt", layout.pki / "user-admin.key")
        with urllib.request.urlopen(f"{layout.server}/readyz", timeout=2, context=context) as answer:  # noqa: S310 (always https)
            return bool(answer.status == http.HTTPStatus.OK)
    except OSError:
        return False


def node_readiness(client: Client, since: Mapping[str, datetime] | None = None) -> dict[str, bool]:
    """Readiness of each node by name. `since`: heartbeats before it (UTC) don't count, because the kubelet that sent them has ended."""

    def is_node_ready(node: Object) -> bool:
        start = (since or {}).get(node["metadata"]["name"])
        after = "" if start is None else f"{start:%Y-%m-%dT%H:%M:%SZ}"  # heartbeats are of whole seconds
        state = condition(node["status"], "Ready")
        return state.get("status") == "True" and (state.get("lastHeartbeatTime") or "") >= after

    return {node["metadata"]["name"]: is_node_ready(node) for node in client.request("GET", path_of("Node"))["items"]}


def set_resources(client: Client, node: str, counts: Mapping[str, int]) -> None:
    """Give the node these pretended resources and take those of earlier calls away. Raises ApiError: there is no such node, or the API
    refuses a name or count.
    """
    path = path_of("Node", None, node)
    capacity = client.request("GET", path)["status"]["capacity"]
    changes: dict[str, str | None] = {key: None for key in capacity if "/" in key}
    changes |= {key: str(count) for key, count in counts.items()}
    if any(capacity.get(key) != value for key, value in changes.items()):
        status = {"capacity": changes, "allocatable": changes}
        client.request("PATCH", f"{path}/status", {"status": status}, None, MERGE)


def create_classes(client: Client) -> None:
    for name in CLASSES:
        _apply(client, storage_class(name))


def _apply(client: Client, item: Object) -> None:
    client.run(lambda cluster: cluster.apply(item))


def create_attachments(client: Client, layout: Layout, rails: int, namespace: str = "default") -> None:
    """The kind NetworkAttachmentDefinition, and one of each rail in a namespace."""
    _apply(client, definition())
    for rail in range(1, rails + 1):
        deadline = time.monotonic() + SERVED_SECONDS
        while not _is_applied(client, attachment(layout, rail, namespace)) and time.monotonic() < deadline:
            time.sleep(0.1)


def _is_applied(client: Client, item: Object) -> bool:
    """Apply the object; return False while its kind, which was just defined, is not served."""
    with tolerated(NOT_FOUND):
        _apply(client, item)
        return True
    return False


def has_default_account(client: Client) -> bool:
    """Return True if pods can be created in the namespace `default`: the controllers make its service account soon after the start."""
    return client.run(lambda cluster: cluster.exists("ServiceAccount", "default", "default"))
