"""Let OpenShift build an image: its objects, the upload of the files, the log while it builds, and how it ended."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.objects import Object
from lockstep.kube.cluster import CONFLICT, MERGE, NOT_FOUND, ApiError, Cluster, Unreachable
from lockstep.kube.kinds import path_of
from lockstep.plan.ship.openshift import LAST_LINES, BuildOutcome, build_outcome, openshift_failure

Say = Callable[[str], None]
START_SECONDS = 900.0
"""The upload's request is answered when the build's pod has taken the files: the builder's image may have to be pulled first."""
POLL_SECONDS = 2.0
LEFT_OUT = "__pycache__"


def packed(root: Path, names: Sequence[str]) -> bytes:
    """A tar archive, compressed, of these files and folders of `root`, of which nobody here is the owner."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz", compresslevel=6) as archive:
        for path in sorted(path for name in names for path in [root / name, *(root / name).rglob("*")]):
            if LEFT_OUT not in path.parts and path.is_file():
                archive.add(path, str(path.relative_to(root)), filter=_nobodys)
    return content.getvalue()


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid, member.gid, member.uname, member.gname = 0, 0, "", ""
    return member


async def build(cluster: Cluster, objects: Sequence[Object], namespace: str, files: bytes, say: Say) -> BuildOutcome:
    """Build an image, and return when the build has ended. Raises ConfigError where the cluster has no builds, ApiError without rights, and Failed when the build does."""
    await _require_builds(cluster)
    for item in objects:
        await _put(cluster, namespace, item)
        say(f"{item['kind']} {item['metadata']['name']}: as it should be")
    name = str(objects[-1]["metadata"]["name"])
    say(f"sending {len(files) / 1e6:.1f} MB; the build starts when its pod has them")
    started = await cluster.upload(path_of("BuildConfig", namespace, name, "instantiatebinary"), files, START_SECONDS)
    return await _followed(cluster, namespace, str(started["metadata"]["name"]), say)


async def _require_builds(cluster: Cluster) -> None:
    for group in ("image.openshift.io/v1", "build.openshift.io/v1"):
        try:
            await cluster.request("GET", f"/apis/{group}")
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            raise ConfigError(
                f"{cluster.server} can't build images: it has no {group}, so it is not OpenShift (or has that left out): "
                "build here and push, lockstep build IMAGE --tag REGISTRY/NAME:TAG --push"
            ) from None


async def _put(cluster: Cluster, namespace: str, item: Object) -> None:
    """Create it, or merge it into the one that is there: OpenShift's own API servers are not all known to take an apply."""
    collection, name = path_of(item["kind"], namespace), item["metadata"]["name"]
    try:
        await cluster.request("POST", collection, item)
    except ApiError as error:
        if error.status == CONFLICT:
            await cluster.request("PATCH", f"{collection}/{quote(name)}", item, content_type=MERGE)
        elif error.status == NOT_FOUND:
            raise Failed(
                f"{error}: create the namespace first (oc new-project {namespace} --skip-config-write), or name another with -n"
            ) from None
        else:
            raise


async def _followed(cluster: Cluster, namespace: str, name: str, say: Say) -> BuildOutcome:
    say(f"build {name} has started; it goes on if you interrupt this command (oc cancel-build -n {namespace} {name} ends it)")
    last: deque[str] = deque(maxlen=LAST_LINES * 2)
    try:
        async for line in cluster.log_of(path_of("Build", namespace, name, "log"), {"follow": "true"}):
            say(line)
            last.append(line)
    except (ApiError, Unreachable) as error:
        say(f"the build's log can't be followed any more ({error}); waiting for its end")
    while True:
        current = await cluster.request("GET", path_of("Build", namespace, name))
        now = build_outcome(current)
        if now.complete:
            return now
        if now.ended:
            raise Failed(*openshift_failure(current, namespace, last))
        await asyncio.sleep(POLL_SECONDS)
