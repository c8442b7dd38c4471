"""The operator's own Secrets: the master key that every job's key is derived from, and the report server's certificates."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from base64 import b64decode, b64encode
from dataclasses import asdict
from datetime import datetime

from lockstep.api.names import APP, LABEL_MANAGED_BY, LABEL_NAME, OPERATOR_NAME
from lockstep.platforms.kubernetes.certificate import Certificates, make_certificates, needs_renewal, renew
from lockstep.platforms.kubernetes.cluster import CONFLICT, ApiError, Cluster, Object

KEY_SECRET = f"{OPERATOR_NAME}-key"
TLS_SECRET = f"{OPERATOR_NAME}-tls"
AUTHORITY = f"{OPERATOR_NAME}-ca"
MASTER_KEY_BYTES = 32
_FIELDS = {"ca_cert": "ca.crt", "ca_key": "ca.key", "tls_cert": "tls.crt", "tls_key": "tls.key"}


def job_key(master: bytes, uid: str) -> str:
    """A job's key, 64 hexadecimal digits. Derived, so that the operator never has to read a job's Secret."""
    return hmac.new(master, uid.encode(), hashlib.sha256).hexdigest()


def run_key(master: bytes, uid: str) -> str:
    """What a job's frozen runs are signed with. Unlike the job's key it never leaves the operator."""
    return hmac.new(master, b"frozen run\0" + uid.encode(), hashlib.sha256).hexdigest()


async def master_key(cluster: Cluster, namespace: str) -> bytes:
    """Made at the operator's very first start."""
    found = await _get_or_create(cluster, namespace, KEY_SECRET, {"key": secrets.token_bytes(MASTER_KEY_BYTES)})
    return found["key"]


async def certificates(cluster: Cluster, namespace: str, dns_names: tuple[str, ...], now: datetime) -> Certificates:
    """Made at the operator's very first start; the server's part is renewed when it is about to expire."""
    found = await cluster.get("Secret", namespace, TLS_SECRET)
    if found is None:
        made = _encode(make_certificates(dns_names, now))
        return _decode(await _get_or_create(cluster, namespace, TLS_SECRET, made))
    known = _decode(_data(found))
    if not needs_renewal(known, dns_names, now):
        return known
    renewed = renew(known, dns_names, now)
    seen = found["metadata"]
    body = _secret(namespace, TLS_SECRET, _encode(renewed))
    body["metadata"] |= {"uid": seen["uid"], "resourceVersion": seen["resourceVersion"]}
    await cluster.apply(body)
    return renewed


async def publish_authority(cluster: Cluster, namespace: str, ca_cert: str) -> None:
    """The authority's certificate into the ConfigMap that Prometheus reads. Raises ApiError, OSError."""
    metadata = {"name": AUTHORITY, "namespace": namespace}
    await cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {_FIELDS["ca_cert"]: ca_cert}})


async def _get_or_create(cluster: Cluster, namespace: str, name: str, data: dict[str, bytes]) -> dict[str, bytes]:
    found = await cluster.get("Secret", namespace, name)
    if found is None:
        try:
            found = await cluster.create(_secret(namespace, name, data))
        except ApiError as error:
            if error.status != CONFLICT:
                raise
            found = await cluster.get("Secret", namespace, name)  # another start of the operator was faster
    if found is None:
        raise RuntimeError(f"Secret {name} of namespace {namespace} was deleted while the operator started")
    return _data(found)


def _secret(namespace: str, name: str, data: dict[str, bytes]) -> Object:
    labels = {LABEL_NAME: APP, LABEL_MANAGED_BY: APP}
    encoded = {key: b64encode(value).decode() for key, value in data.items()}
    return {
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "type": "Opaque", "data": encoded,
    }  # fmt: skip


def _data(secret: Object) -> dict[str, bytes]:
    return {key: b64decode(value) for key, value in secret["data"].items()}


def _encode(value: Certificates) -> dict[str, bytes]:
    return {_FIELDS[field]: text.encode() for field, text in asdict(value).items()}


def _decode(data: dict[str, bytes]) -> Certificates:
    return Certificates(**{field: data[key].decode() for field, key in _FIELDS.items()})
