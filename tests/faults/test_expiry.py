"""What a command made goes by itself when nobody is left to remove it: by the API server's own controllers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.kube import expiry
from lockstep.kube.cluster import Cluster
from lockstep.kube.expiry import expiring
from support.clusters.control_plane import Plane, connected

PATIENCE_SECONDS = 120.0


async def _until(cluster: Cluster, name: str, holds: Callable[[object], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not holds(await cluster.get("ConfigMap", "default", name)):
        assert time.monotonic() < end
        await asyncio.sleep(0.2)


async def _live(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command is killed, another one goes on for longer than its deadline was at first, a third one ends well."""
    async with await connected(kubeconfig) as cluster:

        async def made(name: str) -> object:
            whole = expiring(cluster, "default", name, "image:1")
            owner = await whole.__aenter__()
            assert owner is not None
            metadata = {"name": name, "namespace": "default", "ownerReferences": [owner]}
            await cluster.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
            return whole

        monkeypatch.setattr(expiry, "LEFT_SECONDS", 5)
        monkeypatch.setattr(expiry, "BEAT_SECONDS", 0.5)
        alive, done = await made("alive"), await made("done")
        monkeypatch.setattr(expiry, "_beat", lambda *_: asyncio.sleep(0))
        killed = await made("killed")
        await done.__aexit__(None, None, None)  # type: ignore[attr-defined]
        await _until(cluster, "done", lambda found: found is None)
        await _until(cluster, "killed", lambda found: found is None)
        assert await cluster.get("ConfigMap", "default", "alive") is not None, "it was created before the one that has expired"
        await alive.__aexit__(None, None, None)  # type: ignore[attr-defined]
        await _until(cluster, "alive", lambda found: found is None)
        assert (await cluster.list("Job", "default"))["items"] == []
        await killed.__aexit__(None, None, None)  # type: ignore[attr-defined]


def test_what_a_killed_command_made_is_removed_by_the_cluster_and_what_a_living_one_made_stays(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(_live(plane.kubeconfig, monkeypatch))
