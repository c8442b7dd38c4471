"""Whose token is it, without a TokenReview: for an operator that has no rights outside its namespace.

A TokenReview is a cluster-wide right. The keys that service account tokens are signed with are public, and every service account may read
them (ClusterRole system:service-account-issuer-discovery). What a review knows beyond the signature is whether the token's pod still lives:
`check_node_zero` asks that in any case.
https://kubernetes.io/docs/reference/access-authn-authz/service-accounts-admin/#schema-for-service-account-private-claims
"""

from __future__ import annotations

import json
import logging
import time
from base64 import urlsafe_b64decode
from collections.abc import Callable
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from lockstep.api.objects import Object
from lockstep.kube.cluster import FORBIDDEN, ApiError, Cluster

CONFIGURATION = "/.well-known/openid-configuration"
KEYS = "/openid/v1/jwks"
RIGHT = (
    "kubectl create clusterrolebinding service-account-issuer-discovery "
    "--clusterrole=system:service-account-issuer-discovery --group=system:serviceaccounts"
)
REFRESH_SECONDS = 60.0
"""Least time between two looks at the keys: a flood of made-up tokens costs the API server nothing."""
LEEWAY_SECONDS = 60.0
"""Clocks of machines differ."""
TOKEN_BYTES_MAX = 16 * 1024
_RSA: dict[str, hashes.HashAlgorithm] = {"RS256": hashes.SHA256(), "RS384": hashes.SHA384(), "RS512": hashes.SHA512()}
_CURVES: dict[str, tuple[ec.EllipticCurve, hashes.HashAlgorithm, int]] = {
    "ES256": (ec.SECP256R1(), hashes.SHA256(), 32),
    "ES384": (ec.SECP384R1(), hashes.SHA384(), 48),
    "ES512": (ec.SECP521R1(), hashes.SHA512(), 66),
}
REFUSED: Object = {"authenticated": False}
log = logging.getLogger(__name__)


class IssuedTokens:
    """Answers as the status of a TokenReview does. Raises ApiError and OSError while the keys can't be had."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.time) -> None:
        self._cluster = cluster
        self._clock = clock
        self._issuer = ""
        self._keys: dict[str, Object] = {}
        self._looked = float("-inf")

    async def __call__(self, token: str) -> Object:
        try:
            header, claims, signed, signature = _parts(token)
        except (ValueError, TypeError):
            return REFUSED
        key = await self._key(str(header.get("kid", "")))
        if key is None or not _is_signature(key, str(header.get("alg", "")), signed, signature):
            return REFUSED
        return _status(claims) if self._holds(claims) else REFUSED

    async def _key(self, name: str) -> Object | None:
        if name not in self._keys and self._clock() - self._looked >= REFRESH_SECONDS:
            self._looked = self._clock()
            await self._look()
        return self._keys.get(name)

    async def _look(self) -> None:
        try:
            issuer = (await self._cluster.document(CONFIGURATION, "application/json"))["issuer"]
            keys = (await self._cluster.document(KEYS, "application/jwk-set+json"))["keys"]
        except ApiError as error:
            self._looked = float("-inf")
            if error.status == FORBIDDEN:
                log.error(
                    "no report can be taken: this operator may not read the keys of service account tokens; an administrator: %s", RIGHT
                )
            raise
        self._issuer, self._keys = str(issuer), {str(key.get("kid", "")): key for key in keys}

    def _holds(self, claims: Object) -> bool:
        """Issued here, and valid now."""
        now, end, begin = self._clock(), claims.get("exp"), claims.get("nbf", 0)
        if not isinstance(end, int | float) or not isinstance(begin, int | float):
            return False
        return claims.get("iss") == self._issuer and begin - LEEWAY_SECONDS <= now < end


def _parts(token: str) -> tuple[Object, Object, bytes, bytes]:
    """Header, claims, what is signed, and the signature. Raises ValueError."""
    if len(token) > TOKEN_BYTES_MAX:
        raise ValueError("too long")
    signed, _, signature = token.rpartition(".")
    header, claims = (json.loads(_bytes(part)) for part in signed.split("."))
    if not isinstance(header, dict) or not isinstance(claims, dict):
        raise ValueError("no objects")
    return header, claims, signed.encode(), _bytes(signature)


def _bytes(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _integer(text: str) -> int:
    return int.from_bytes(_bytes(text))


def _is_signature(key: Object, algorithm: str, signed: bytes, signature: bytes) -> bool:
    """Return True if the signature is by a public key (JWK) whose type is the algorithm's: the token doesn't choose how it is checked."""
    try:
        if key["kty"] == "RSA" and algorithm in _RSA:
            public = rsa.RSAPublicNumbers(_integer(key["e"]), _integer(key["n"])).public_key()
            public.verify(signature, signed, padding.PKCS1v15(), _RSA[algorithm])
            return True
        if key["kty"] == "EC" and algorithm in _CURVES:
            curve, digest, size = _CURVES[algorithm]
            if len(signature) != 2 * size:
                return False
            point = ec.EllipticCurvePublicNumbers(_integer(key["x"]), _integer(key["y"]), curve).public_key()
            halves = int.from_bytes(signature[:size]), int.from_bytes(signature[size:])
            point.verify(encode_dss_signature(*halves), signed, ec.ECDSA(digest))
            return True
    except (InvalidSignature, ValueError, KeyError, TypeError):
        return False
    return False


def _status(claims: Object) -> Object:
    """Return the refusal in the words of a TokenReview."""
    audiences: Any = claims.get("aud", [])
    bound = claims.get("kubernetes.io")
    pod = bound.get("pod") if isinstance(bound, dict) else None
    extra = {}
    if isinstance(pod, dict):
        extra = {
            "authentication.kubernetes.io/pod-name": [str(pod.get("name"))],
            "authentication.kubernetes.io/pod-uid": [str(pod.get("uid"))],
        }
    return {
        "authenticated": True,
        "audiences": audiences if isinstance(audiences, list) else [audiences],
        "user": {"username": str(claims.get("sub", "")), "extra": extra},
    }
