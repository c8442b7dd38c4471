"""The operator on the embedded cluster: what is sent, and how."""

from __future__ import annotations

import asyncio

from lockstep.api.cluster import TrainingCluster
from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.api.objects import Object
from lockstep.devcluster.host.layout import default_layout
from lockstep.devcluster.images import BASE
from lockstep.devcluster.python_volume import publish_code
from lockstep.kube.cluster import Cluster
from lockstep.platforms.clusters.install import operator_objects, until_ready
from lockstep.platforms.clusters.send import send_permitted
from support.checkout import ROOT


def local_profile() -> TrainingCluster:
    return parse_cluster_file((ROOT / "clusters" / "local.yaml").read_text(), "local.yaml").profile


def local_objects() -> list[Object]:
    """Objects that `lockstep deploy local` sends: the operator's code comes from a volume, this checkout's as it is now."""
    return objects_of(local_profile(), BASE, publish_code(default_layout().python_volume).name)


def objects_of(profile: TrainingCluster, image: str, revision: str = "") -> list[Object]:
    return operator_objects(profile, image, namespace="lockstep", manifests=ROOT / "manifests", revision=revision)


def send(objects: list[Object]) -> None:
    """Apply them, and wait for the operator when it is among them."""

    async def connected() -> None:
        async with await Cluster.connect() as connection:
            await install(connection, objects)

    asyncio.run(connected())


async def install(cluster: Cluster, objects: list[Object]) -> None:
    """Do the same on a connection."""
    assert (await send_permitted(cluster, objects, lambda line: None)).left == ()
    for item in objects:
        if item["kind"] == "Deployment":
            await until_ready(cluster, item["metadata"]["namespace"], item["metadata"]["name"])
