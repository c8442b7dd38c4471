"""Whose token is it, without a TokenReview: for an operator that has no rights outside its namespace.

A TokenReview is a cluster-wide right. The keys that service account tokens are signed with are public, and every service account may read
them (ClusterRole system:service-account-issuer-discovery). What a review knows beyond the signature is whether the token's pod still lives:
`check_node_zero` asks that in any case.
https://kubernetes.io/docs/reference/access-authn-authz/service-accounts-admin/#schema-for-service-account-private-claims
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import jwt

from lockstep.api.names import REPORT_AUDIENCE
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
"""Difference of clocks that a TokenReview allows, too."""
TOKEN_BYTES_MAX = 16 * 1024
KEY_TYPES = ("RSA", "EC")
REFUSED: Object = {"authenticated": False}
log = logging.getLogger(__name__)


class IssuedTokens:
    """Answers as the status of a TokenReview does. Raises ApiError and OSError while the keys can't be had."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._issuer = ""
        self._keys: dict[str | None, jwt.PyJWK] = {}
        self._looked = float("-inf")

    async def __call__(self, token: str) -> Object:
        if len(token) > TOKEN_BYTES_MAX:
            return REFUSED
        try:
            key = await self._key(jwt.get_unverified_header(token).get("kid"))
            return REFUSED if key is None else _status(self._claims(token, key))
        except (jwt.PyJWTError, ValueError):
            return REFUSED

    async def _key(self, name: str | None) -> jwt.PyJWK | None:
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
        self._issuer, self._keys = str(issuer), {key.key_id: key for key in _readable(keys)}

    def _claims(self, token: str, key: jwt.PyJWK) -> Object:
        """Return the claims of a token that was issued here for reports and is valid now. The key has the algorithm, not the token. Raises
        jwt.PyJWTError.
        """
        options: Any = {"require": ["exp"]}
        return jwt.decode(token, key, options=options, audience=REPORT_AUDIENCE, issuer=self._issuer, leeway=LEEWAY_SECONDS)


def _readable(keys: Iterable[Object]) -> Iterator[jwt.PyJWK]:
    """Yield the public keys that PyJWT can read: one that it can't must not refuse the tokens of the others."""
    for key in keys:
        with suppress(jwt.PyJWTError):
            if key.get("kty") in KEY_TYPES:
                yield jwt.PyJWK(key)


def _status(claims: Object) -> Object:
    """Return the claims in the words of a TokenReview."""
    bound = claims.get("kubernetes.io")
    pod = bound.get("pod") if isinstance(bound, dict) else None
    extra = {}
    if isinstance(pod, dict):
        extra = {
            "authentication.kubernetes.io/pod-name": [str(pod.get("name"))],
            "authentication.kubernetes.io/pod-uid": [str(pod.get("uid"))],
        }
    return {"authenticated": True, "audiences": [REPORT_AUDIENCE], "user": {"username": str(claims.get("sub", "")), "extra": extra}}
