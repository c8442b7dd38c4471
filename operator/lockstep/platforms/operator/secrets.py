"""The operator's own Secrets: the master key that every job's key is derived from, and the report server's certificates."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from base64 import b64decode, b64encode
from dataclasses import asdict
from datetime import datetime

from lockstep.api.names import APP, KEY_SECRET, LABEL_MANAGED_BY, LABEL_NAME, OPERATOR_NAME, TLS_SECRET, key_secret_name
from lockstep.api.objects import Object
from lockstep.kube.cluster import CONFLICT, ApiError, Cluster
from lockstep.platforms.operator.certificate import Certificates, check, make_certificates, needs_renewal, renew

log = logging.getLogger("lockstep.operator")

AUTHORITY = f"{OPERATOR_NAME}-ca"
MASTER_KEY_BYTES = 32
MARK_CHARACTERS = 16
_FIELDS = {"ca_cert": "ca.crt", "ca_key": "ca.key", "tls_cert": "tls.crt", "tls_key": "tls.key"}


def job_key(master: bytes, uid: str) -> str:
    """A job's key, 64 hexadecimal digits. Derived, so that the operator never has to read a job's Secret."""
    return hmac.new(master, uid.encode(), hashlib.sha256).hexdigest()


def key_secret(master: bytes, job: str, uid: str) -> str:
    """Name of the Secret with a job's key. Nobody else can tell it before it is there: one that is there already is the operator's own."""
    mark = hmac.new(master, b"secret name\0" + uid.encode(), hashlib.sha256).hexdigest()[:MARK_CHARACTERS]
    return key_secret_name(job, f"{uid}-{mark}")


def run_key(master: bytes, uid: str) -> str:
    """Key that a job's frozen runs are signed with. Unlike the job's key it never leaves the operator."""
    return hmac.new(master, b"frozen run\0" + uid.encode(), hashlib.sha256).hexdigest()


class UnusableSecret(Exception):
    """One of the operator's own Secrets holds something else than it should."""

    def __init__(self, namespace: str, name: str, why: str) -> None:
        super().__init__(
            f"Secret {name} in namespace {namespace} {why}: restore it, or delete it and a new one is made; jobs that run then say what"
            " to do"
        )


async def master_key(cluster: Cluster, namespace: str, current: bytes | None = None) -> bytes:
    """Made at the operator's very first start. `current`: what this process uses, written back where the Secret is gone. Raises
    UnusableSecret.
    """
    key = secrets.token_bytes(MASTER_KEY_BYTES) if current is None else current
    stored = (await _get_or_create(cluster, namespace, KEY_SECRET, {"key": key})).get("key", b"")
    if len(stored) < MASTER_KEY_BYTES:
        raise UnusableSecret(namespace, KEY_SECRET, f"has no field `key` of {MASTER_KEY_BYTES} bytes")
    return stored


async def certificates(
    cluster: Cluster, namespace: str, dns_names: tuple[str, ...], now: datetime, current: Certificates | None = None
) -> Certificates:
    """Made at the operator's very first start; the server's part is renewed when it is about to expire.

    `current`: what this process uses, written back where the Secret is gone: another authority would be one that no running gang trusts.
    Raises UnusableSecret.
    """
    secret = await cluster.get("Secret", namespace, TLS_SECRET)
    if secret is None:
        encoded = _encode(make_certificates(dns_names, now) if current is None else current)
        return _readable(namespace, await _get_or_create(cluster, namespace, TLS_SECRET, encoded))
    stored = _readable(namespace, _data(secret))
    if not needs_renewal(stored, dns_names, now):
        return stored
    renewed = renew(stored, dns_names, now)
    metadata = secret["metadata"]
    body = _secret(namespace, TLS_SECRET, _encode(renewed))
    body["metadata"] |= {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
    await cluster.apply(body)
    return renewed


def _readable(namespace: str, data: dict[str, bytes]) -> Certificates:
    try:
        stored = Certificates(**{field: data[key].decode() for field, key in _FIELDS.items()})
        check(stored)
    except (KeyError, ValueError) as error:
        why = f"can't be read as certificates ({type(error).__name__}: {error})"
        raise UnusableSecret(namespace, TLS_SECRET, why) from None
    return stored


async def publish_authority(cluster: Cluster, namespace: str, ca_cert: str) -> None:
    """The authority's certificate into the ConfigMap that Prometheus reads. Raises ApiError, OSError."""
    metadata = {"name": AUTHORITY, "namespace": namespace}
    await cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {_FIELDS["ca_cert"]: ca_cert}})


async def _get_or_create(cluster: Cluster, namespace: str, name: str, data: dict[str, bytes]) -> dict[str, bytes]:
    secret = await cluster.get("Secret", namespace, name)
    if secret is None:
        log.warning("Secret %s is not in namespace %s: it is made", name, namespace)
        try:
            secret = await cluster.create(_secret(namespace, name, data))
        except ApiError as error:
            if error.status != CONFLICT:
                raise
            secret = await cluster.get("Secret", namespace, name)  # another start of the operator was faster
    if secret is None:
        raise RuntimeError(f"Secret {name} of namespace {namespace} was deleted while the operator started")
    return _data(secret)


def _secret(namespace: str, name: str, data: dict[str, bytes]) -> Object:
    labels = {LABEL_NAME: APP, LABEL_MANAGED_BY: APP}
    encoded = {key: b64encode(value).decode() for key, value in data.items()}
    return {
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "type": "Opaque", "data": encoded,
    }  # fmt: skip


def _data(secret: Object) -> dict[str, bytes]:
    return {key: b64decode(value) for key, value in (secret.get("data") or {}).items()}


def _encode(value: Certificates) -> dict[str, bytes]:
    return {_FIELDS[field]: text.encode() for field, text in asdict(value).items()}
