"""The same connection for kopf that `Cluster` uses."""

from __future__ import annotations

import os

import kopf

from lockstep.platforms.kubernetes.client import IN_CLUSTER, has_kubeconfig, kubeconfig_path


async def connection() -> kopf.ConnectionInfo:
    """KUBECONFIG or ~/.kube/config, else the pod's service account, whose token is read again at every login."""
    from kubernetes.aio import client, config

    configuration = client.Configuration()
    if has_kubeconfig() or IN_CLUSTER not in os.environ:
        await config.load_kube_config(kubeconfig_path(), client_configuration=configuration)
    else:
        config.load_incluster_config(client_configuration=configuration)
    header = (await configuration.auth_settings()).get("BearerToken", {}).get("value", "")  # "Bearer …" or "bearer …"
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        token=header.rpartition(" ")[2] or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )
