"""`GET /metrics` over HTTPS, for those whom the cluster lets read it: RBAC says so, as for the cluster's own components.

Names of jobs and namespaces are not for every pod's eyes. The scraper shows its own token; the API server says whose it is (TokenReview) and
whether that account may get the URL /metrics (SubjectAccessReview; ClusterRole lockstep-metrics-reader).
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from lockstep.kube.cluster import ApiError, Cluster
from lockstep.kube.kinds import path_of
from lockstep.platforms.operator.authenticate import FORBIDDEN, UNAUTHENTICATED, Refusal

PATH = "/metrics"
REMEMBERED_SECONDS = 60.0
REMEMBERED = 64
"""Tokens whose right is remembered: a flood of others costs the API server, never memory."""


@dataclass
class MetricsServer:
    """`cluster` isn't fenced: every replica is scraped."""

    cluster: Cluster
    registry: CollectorRegistry
    _until: dict[str, float] = field(default_factory=dict)

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get(PATH, self.show)
        return app

    async def show(self, request: web.Request) -> web.Response:
        try:
            await self._check(request.headers.get("Authorization", ""))
        except Refusal as refusal:
            return web.Response(text=f"{refusal}\n", status=refusal.status)
        except (ApiError, OSError) as error:
            return web.Response(text=f"the token can't be checked now: {error}\n", status=503)
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self.registry), headers={"Content-Type": content_type})

    async def _check(self, authorization: str) -> None:
        """Raises Refusal."""
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Refusal(UNAUTHENTICATED, "Authorization must be Bearer and a service account's token")
        digest = hashlib.sha256(token.strip().encode()).hexdigest()
        if self._until.get(digest, 0.0) > time.monotonic():
            return
        await self._ask(token.strip())
        if len(self._until) >= REMEMBERED:
            self._until.clear()
        self._until[digest] = time.monotonic() + REMEMBERED_SECONDS

    async def _ask(self, token: str) -> None:
        """The API server: whose token it is, and whether that account may. Raises Refusal."""
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
        found = (await self.cluster.request("POST", path_of("TokenReview"), review))["status"]
        if not found.get("authenticated"):
            raise Refusal(UNAUTHENTICATED, "the token isn't valid")
        user = found["user"]
        asked = {key: user[key] for key in ("uid", "groups", "extra") if key in user} | {"user": user["username"]}
        spec = {**asked, "nonResourceAttributes": {"path": PATH, "verb": "get"}}
        access = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
        if not (await self.cluster.request("POST", path_of("SubjectAccessReview"), access))["status"].get("allowed"):
            raise Refusal(FORBIDDEN, f"{user['username']} may not get {PATH}: bind it to ClusterRole lockstep-metrics-reader")
