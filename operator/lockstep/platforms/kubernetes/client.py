"""Which cluster is talked to, and as whom: KUBECONFIG or ~/.kube/config (--context chooses in it), else the pod's service account."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lockstep.api.errors import ConfigError

IN_CLUSTER = "KUBERNETES_SERVICE_HOST"


def has_kubeconfig() -> bool:
    return "KUBECONFIG" in os.environ or (Path.home() / ".kube" / "config").exists()


def kubeconfig_path() -> str:
    """Read now: the libraries read $KUBECONFIG only once, when they are imported."""
    return os.environ.get("KUBECONFIG", str(Path.home() / ".kube" / "config"))


def connect(context: str | None = None) -> Any:
    """A blocking `kubernetes.client.ApiClient` for the command line. Raises ConfigError when there is no cluster to talk to."""
    from kubernetes import client, config

    configuration = client.Configuration()
    try:
        if has_kubeconfig() or IN_CLUSTER not in os.environ:
            config.load_kube_config(kubeconfig_path(), context=context, client_configuration=configuration)
        else:
            config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException as error:
        raise no_cluster(error) from None
    return client.ApiClient(configuration)


def no_cluster(error: Exception) -> ConfigError:
    """A kubeconfig that isn't there, or that lacks what it should have: what stands in it is the person's to correct."""
    path = kubeconfig_path()
    if not any(Path(part).expanduser().exists() for part in path.split(os.pathsep) if part):
        stated = (
            f"KUBECONFIG names {path}, which is not there"
            if "KUBECONFIG" in os.environ
            else f"there is no {path} and KUBECONFIG is not set"
        )
        return ConfigError(
            f"no cluster can be reached: {stated}; set KUBECONFIG to a kubeconfig file (for the embedded cluster: make cluster-up)"
        )
    said = str(error).removesuffix(".")
    return ConfigError(
        f"no cluster can be reached by {path}: {said}; set KUBECONFIG to another file, or say a --context that it has (kubectl config get-contexts)"
    )
