"""The API of our two kinds at a real API server, as plain requests: replies are JSON, refusals too."""

from __future__ import annotations

import json
import time
from typing import Any

from kubernetes import client, watch

from lockstep.api.files.yamltext import dump_yaml
from lockstep.api.names import GROUP, VERSION


class Server:
    """The API of our two kinds, in a namespace of its own and, where `group` says so, in an API group that no operator watches."""

    def __init__(self, api: client.ApiClient, namespace: str, group: str = GROUP) -> None:
        self.api = api
        self.namespace = namespace
        self.group = group

    def path(self, kind: str, name: str = "") -> str:
        place = f"namespaces/{self.namespace}/trainingjobs" if kind == "TrainingJob" else "trainingclusters"
        return f"/apis/{self.group}/{VERSION}/{place}" + (f"/{name}" if name else "")

    def send(self, method: str, path: str, body: Any = None, *, form: str = "application/json", accept: str = "application/json") -> Any:
        """The reply's JSON, whatever its status."""
        url, headers = self.api.configuration.host + path, {"Content-Type": form, "Accept": accept}
        self.api.update_params_for_auth(headers, [], ["BearerToken"], url, method, None)
        content = body.encode() if isinstance(body, str) else self._moved(body, GROUP, self.group)
        return self._moved(json.loads(self.api.call_api(method, url, headers, content).read()), self.group, GROUP)

    def _moved(self, item: Any, old: str, new: str) -> Any:
        """The object in the other group."""
        return (
            item | {"apiVersion": f"{new}/{VERSION}"} if isinstance(item, dict) and item.get("apiVersion") == f"{old}/{VERSION}" else item
        )

    def create(self, item: dict[str, Any], *, keep: bool = False) -> Any:
        options = "fieldValidation=Strict" if keep else "fieldValidation=Strict&dryRun=All"
        return self.send("POST", f"{self.path(item['kind'])}?{options}", item)

    def replace(self, item: dict[str, Any], old: dict[str, Any]) -> Any:
        """Answer to an update of `old` to `item`."""
        versioned = item | {"metadata": item["metadata"] | {"resourceVersion": old["metadata"]["resourceVersion"]}}
        return self.send("PUT", f"{self.path(item['kind'], item['metadata']['name'])}?dryRun=All&fieldValidation=Strict", versioned)

    def apply_crd(self, original: dict[str, Any]) -> str:
        """Applies a CustomResourceDefinition for this group; returns its name when its kind can be used."""
        name = f"{original['spec']['names']['plural']}.{self.group}"
        crd = original | {"metadata": {"name": name}, "spec": original["spec"] | {"group": self.group}}
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}?fieldManager=lockstep&force=true"
        reply = self.send("PATCH", path, dump_yaml(crd), form="application/apply-patch+yaml")
        assert reply["kind"] == "CustomResourceDefinition", reply["message"]
        listing = client.ApiextensionsV1Api(self.api).list_custom_resource_definition
        for event in watch.Watch().stream(listing, field_selector=f"metadata.name={name}", timeout_seconds=20):
            if any(c.type == "Established" and c.status == "True" for c in event["object"].status.conditions or ()):
                return name
        raise AssertionError(f"{name} was not established within 20 s")

    def wait_until_published(self, kind: str) -> None:
        """The OpenAPI document follows a CRD within seconds, and nothing can be watched for that."""
        path, deadline = f"/openapi/v3/apis/{GROUP}/{VERSION}", time.monotonic() + 30
        while f"dev.lockstep.{VERSION}.{kind}" not in self.send("GET", path).get("components", {}).get("schemas", {}):
            assert time.monotonic() < deadline, f"{path} does not have {kind}"
            time.sleep(0.2)


def told(reply: dict[str, Any]) -> list[tuple[str, str]]:
    """(field, message) of every cause that the API server gives."""
    assert reply["kind"] == "Status", "it was accepted"
    return [(cause.get("field", ""), cause["message"]) for cause in reply["details"]["causes"]]


def stored(reply: dict[str, Any]) -> dict[str, Any]:
    assert reply["kind"] != "Status", reply["message"]
    return reply
