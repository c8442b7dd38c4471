"""Requests to the cluster's API server: its readiness and the nodes', storage classes, pretended resources."""

from __future__ import annotations

import http
import ssl
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

from lockstep.devcluster.host.layout import Layout
from lockstep.devcluster.provisioner import CLASSES, storage_class

NEVER = datetime.min.replace(tzinfo=UTC)
SERVED_SECONDS = 20.0
"""For a new kind to be served."""


@contextmanager
def connected(layout: Layout) -> Iterator[Any]:
    """A client of the core API as administrator; closed afterwards."""
    from kubernetes import client, config

    with config.new_client_from_config(str(layout.kubeconfig)) as connection:
        yield client.CoreV1Api(connection)


def is_ready(layout: Layout) -> bool:
    """Return True if the API server answers that it is ready."""
    try:
        context = ssl.create_default_context(cafile=str(layout.pki / "ca.crt"))
        context.load_cert_chain(layout.pki / "user-admin.crt", layout.pki / "user-admin.key")
        with urllib.request.urlopen(f"{layout.server}/readyz", timeout=2, context=context) as answer:  # noqa: S310 (always https)
            return bool(answer.status == http.HTTPStatus.OK)
    except OSError:
        return False


def node_readiness(core: Any, since: Mapping[str, datetime] | None = None) -> dict[str, bool]:
    """Readiness of each node by name. `since`: heartbeats before it don't count, because the kubelet that sent them has ended."""

    def ready(item: Any) -> bool:
        after = (since or {}).get(item.metadata.name, NEVER).replace(microsecond=0)  # heartbeats are of whole seconds
        return any(
            c.type == "Ready" and c.status == "True" and (c.last_heartbeat_time or NEVER) >= after for c in item.status.conditions or []
        )

    return {item.metadata.name: ready(item) for item in core.list_node().items}


def set_resources(core: Any, node: str, counts: Mapping[str, int]) -> None:
    """Give the node these pretended resources and take those of earlier calls away.

    Raises:
        kubernetes.client.ApiException: there is no such node, or a name or count that the API refuses.
    """
    capacity = core.read_node(node).status.capacity
    changes: dict[str, str | None] = {key: None for key in capacity if "/" in key}
    changes.update({key: str(count) for key, count in counts.items()})
    if any(capacity.get(key) != value for key, value in changes.items()):
        core.patch_node_status(node, {"status": {"capacity": changes, "allocatable": changes}})


def create_classes(core: Any) -> None:
    from kubernetes import client

    storage = client.StorageV1Api(core.api_client)
    for name in CLASSES:
        _tolerate(409, partial(storage.create_storage_class, storage_class(name)))


def create_attachments(core: Any, layout: Layout, rails: int, namespace: str = "default") -> None:
    """The kind NetworkAttachmentDefinition, and one of each rail in a namespace."""
    from kubernetes import client

    from lockstep.devcluster.rails import attachment, definition

    _tolerate(409, partial(client.ApiextensionsV1Api(core.api_client).create_custom_resource_definition, definition()))
    objects = client.CustomObjectsApi(core.api_client)
    plural = definition()["spec"]["names"]["plural"]
    for rail in range(1, rails + 1):
        deadline = time.monotonic() + SERVED_SECONDS
        while not _is_created(objects, attachment(layout, rail, namespace), plural) and time.monotonic() < deadline:
            time.sleep(0.1)


def _is_created(objects: Any, item: dict[str, Any], plural: str) -> bool:
    """Create the object; return True if it is there now. A kind that was just defined is answered with 404 until it is served."""
    group, version = item["apiVersion"].split("/")
    make = partial(objects.create_namespaced_custom_object, group, version, item["metadata"]["namespace"], plural, item)
    return _tolerate(404, lambda: _tolerate(409, make) or item) is not None


def delete_attachments(core: Any) -> None:
    """The kind, and with it all of them."""
    from kubernetes import client

    from lockstep.devcluster.rails import definition

    api = client.ApiextensionsV1Api(core.api_client)
    _tolerate(404, partial(api.delete_custom_resource_definition, definition()["metadata"]["name"]))


def has_default_account(core: Any) -> bool:
    """Return True if pods can be created in the namespace `default`: the controllers make its service account soon after the start."""
    return _tolerate(404, lambda: core.read_namespaced_service_account("default", "default")) is not None


def _tolerate(status: int, request: Callable[[], Any]) -> Any:
    """The answer; None when the API refuses with this status."""
    from kubernetes.client.exceptions import ApiException

    try:
        return request()
    except ApiException as error:
        if error.status != status:
            raise
        return None
