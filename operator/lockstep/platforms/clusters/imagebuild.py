"""Let OpenShift build an image: its objects, the upload of the files, the log while it builds, and how it ended."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import shutil
import tarfile
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.objects import Object
from lockstep.assets import PACKAGES, asset, package
from lockstep.kube.cluster import CONFLICT, MERGE, NOT_FOUND, ApiError, Cluster, Unreachable
from lockstep.kube.kinds import path_of
from lockstep.plan.ship.imagebuild import CONTEXTS, Image
from lockstep.plan.ship.openshift import LAST_LINES, BuildOutcome, build_outcome, openshift_failure

Say = Callable[[str], None]
START_SECONDS = 900.0
"""The upload's request is answered when the build's pod has taken the files: the builder's image may have to be pulled first."""
POLL_SECONDS = 2.0
KEPT_SECONDS = 86400.0  # of copies of files and drafts of them, which a build may use


def context(image: Image) -> dict[str, Path]:
    """Return every file that the image is made from, by its path in the build: the same ones from a checkout and from a wheel."""
    files: dict[str, Path] = {}
    for name in CONTEXTS[image]:
        last = name.rpartition("/")[2]
        is_code = last in PACKAGES
        top = package(last) if is_code else asset(name)
        for path in [top, *top.rglob("*")]:
            inside = path.relative_to(top)
            if path.is_file() and "__pycache__" not in inside.parts and not (is_code and inside.parts[:1] == ("assets",)):
                files[str(name / inside)] = path
    return dict(sorted(files.items()))


def packed(files: Mapping[str, Path]) -> bytes:
    """Return a compressed tar archive of these files, readable by every user and root's own."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz", compresslevel=6) as archive:
        for name, path in files.items():
            archive.add(path, name, filter=_plain)
    return content.getvalue()


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid, member.gid, member.uname, member.gname, member.mode = 0, 0, "", "", 0o644
    return member


def folder_of(files: Mapping[str, Path], folder: Path) -> Path:
    """Return the folder inside `folder` for copies of these files, named by their content."""
    digest = hashlib.sha256()
    for name, path in files.items():
        digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return folder / digest.hexdigest()[:16]


def lay_out(files: Mapping[str, Path], target: Path) -> None:
    """Copy these files into the folder `target`, and remove what older builds left beside it. Raises Failed where it can't be written."""
    folder = target.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not target.is_dir():
            with tempfile.TemporaryDirectory(prefix=".", dir=folder) as temporary:
                draft = Path(temporary, target.name)
                for name, path in files.items():
                    (draft / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, draft / name)
                for path in [draft, *draft.rglob("*")]:  # as the image's users are to find them, whatever the umask
                    path.chmod(0o755 if path.is_dir() else 0o644)
                draft.rename(target)
        os.utime(target)
    except OSError as error:
        if not target.is_dir():  # else another build has just put them there
            raise Failed(f"the image's files can't be written into {target}: {error.strerror}") from error
    for old in folder.iterdir():
        with suppress(OSError):  # another build may have removed it
            if old.stat().st_mtime < time.time() - KEPT_SECONDS:
                shutil.rmtree(old)


async def build(cluster: Cluster, objects: Sequence[Object], namespace: str, files: bytes, say: Say) -> BuildOutcome:
    """Build an image, and return when the build has ended. Raises ConfigError where the cluster has no builds, ApiError without rights, and
    Failed when the build does.
    """
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
