"""`lockstep why --bundle`: write all that helps to find a cause into one archive without secrets, which names what could not be read."""

from __future__ import annotations

import asyncio
import importlib
import io
import os
import pkgutil
import re
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from lockstep.api.errors import Failed, LockstepError
from lockstep.api.names import CONTAINER, RUN_FOLDER, RUN_KEY, pod_name
from lockstep.api.objects import Object, claim_names, is_running
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.kube.exec import PodPlace
from lockstep.plan.observed import Observed
from lockstep.plan.pages.redact import Redactor, secret_values
from lockstep.plan.times import timestamp
from lockstep.platforms.files.reader import beside, nodes_with_volumes
from lockstep.platforms.files.results import run_folder
from lockstep.platforms.inpod import runfiles, source_of
from lockstep.platforms.jobs.observe import JobObserver
from lockstep.programs import Place, ProgramFailed, python_output
from lockstep_spec.words import printable_line

LOG_LINES, LOG_BYTES = 20_000, 32 << 20
FILE_BYTES, ALL_BYTES = 2 << 20, 64 << 20
ARCHIVE_BYTES_MAX = ALL_BYTES + (16 << 20)
"""Limit of a pod's archive, with what tar adds to ten thousand small files."""
BUNDLE_BYTES_MAX = 512 << 20
"""Bytes after which no further pod is asked: the bundle is built in this machine's memory."""
FILES_MAX = 20_000
NAME_BYTES_MAX, PART_BYTES_MAX = 1024, 255
SEND_SECONDS = 300.0
STARTED_SECONDS, LOOK_SECONDS = 5.0, 0.5
"""A kubelet shows no log of a container that began to run within the last second: it is asked again for so long."""
WAITING = "is waiting to start"
READER_SECONDS = 900
"""Lifetime of a pod that shows the volume of a job without pods."""
READERS_MAX = 16
"""Volumes of a job without pods that are read, one after the other."""
LEFT_OUT = ("IPPublicDetector", "PrivateKeyDetector", "NpmDetector", "BasicAuthDetector")
"""Detectors of what a bundle shows, and of what `redact` takes out with more of its surroundings."""
LONG = re.compile(r".{4096}")
FULL = f"the bundle has more than {BUNDLE_BYTES_MAX >> 20} MiB already"
ABOUT = """What `lockstep why --bundle` found of job {name} in namespace {namespace} at {time}.

why.txt       what `lockstep why` says
objects/      the job, its cluster, its objects and pods, its claims and nodes; never a Secret
fabric.yaml   what NCCL's own log says that the ranks use
events.yaml   what the cluster told of them
pods/         the last {lines} lines of every container, and of the one before it
run/          the run's folder without checkpoints: logs, stacks, records; the last 2 MiB of each file

Values of all variables but well-known ones, and text that looks like a token, were replaced by (redacted). Nothing can
tell every secret by its looks: look through this before you give it to somebody you don't trust.

Not in here:
{missing}
"""


def scanner(left_out: Sequence[str] = LEFT_OUT) -> Callable[[str], Iterator[str]]:
    """Return what finds secrets in a text by the forms that detect-secrets knows."""
    from detect_secrets import plugins
    from detect_secrets.plugins.base import RegexBasedDetector

    for plugin in pkgutil.iter_modules(plugins.__path__):
        importlib.import_module(f"{plugins.__name__}.{plugin.name}")
    detectors = [detector() for detector in RegexBasedDetector.__subclasses__() if detector.__name__ not in left_out]

    def scan(text: str) -> Iterator[str]:
        lines = LONG.sub(r"\g<0>\n", text)  # (some rules take the square of a line's length)
        return (str(secret) for detector in detectors for secret in detector.analyze_string(lines))

    return scan


@dataclass(frozen=True)
class Piece:
    """A file of the bundle."""

    path: str
    data: bytes


async def write_bundle(path: Path, connection: Cluster, observed: Observed, why: str) -> list[str]:
    """Write the archive; what could not be had, one sentence each. Raises OSError when `path` can't be written."""
    look = JobObserver(connection)
    around = [item async for item in _around(look, observed)]
    events = await _events(look, observed)
    redactor = Redactor(secret_values(around), scanner())
    pieces = [Piece("why.txt", _clean(redactor, why)), Piece("events.yaml", _yaml(redactor, events))]
    if "fabric" in observed.status:
        pieces.append(Piece("fabric.yaml", _yaml(redactor, observed.status["fabric"])))
    pieces += [Piece(f"objects/{item['kind']}-{item['metadata']['name']}.yaml", _yaml(redactor, item)) for item in around]
    missing, until = [*look.not_seen], time.monotonic() + STARTED_SECONDS
    for pod in observed.pods:
        if _is_full(pieces):
            missing.append(f"logs of pod {pod['metadata']['name']}: {FULL}")
            continue
        pieces += [piece async for piece in _logs(connection, pod, redactor, missing, until)]
    await _add_run_folder(connection, observed, redactor, missing, pieces)
    about = ABOUT.format(
        name=observed.name, namespace=observed.namespace, time=timestamp(time.time()), lines=LOG_LINES,
        missing="\n".join(f"- {text}" for text in missing) or "- nothing that was looked for",
    )  # fmt: skip
    _write(path, f"{observed.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}", [Piece("README.txt", about.encode()), *pieces])
    return missing


async def _around(look: JobObserver, observed: Observed) -> AsyncIterator[Object]:
    """Yield the job and everything of the cluster that has a part in it."""
    yield {**observed.job, "kind": "TrainingJob"}
    for item in (*observed.objects.values(), *observed.pods):
        yield item
    claims = {name for pod in observed.pods for name in claim_names(pod)}
    for name in sorted(claims & observed.claims.keys()):
        yield observed.claims[name]
    profile = observed.status_part("cluster").get("name")
    for item in (await look.all("TrainingCluster", None)).items:
        if item["metadata"]["name"] == profile:
            yield item
    used = {pod["spec"].get("nodeName") for pod in observed.pods}
    for item in (await look.all("Node", None)).items:
        if item["metadata"]["name"] in used or not used:
            yield item


async def _events(look: JobObserver, observed: Observed) -> list[Object]:
    """Events about the job and all that it made, oldest first."""
    uids = {item["metadata"]["uid"] for item in (observed.job, *observed.objects.values(), *observed.pods, *observed.claims.values())}
    names = {item["metadata"]["name"] for item in (observed.job, *observed.pods)}
    events = (await look.all("Event", observed.namespace)).items
    own = [e for e in events if e["involvedObject"].get("uid") in uids or e["involvedObject"].get("name") in names]
    return sorted(own, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))


async def _logs(connection: Cluster, pod: Object, redactor: Redactor, missing: list[str], until: float) -> AsyncIterator[Piece]:
    status, name = pod.get("status", {}), pod["metadata"]["name"]
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        streams: list[tuple[str, dict[str, str]]] = [("", {})]
        streams += [(".previous", {"previous": "true"})] if container.get("restartCount") else []
        for suffix, query in streams:
            try:
                lines = await _log_of(connection, pod, container["name"], query, until)
            except (ApiError, OSError) as error:
                missing.append(f"log of container {container['name']}{suffix} of pod {name}: {error}")
                continue
            yield Piece(f"pods/{name}/{container['name']}{suffix}.log", _clean(redactor, "\n".join(lines) + "\n"))


async def _log_of(connection: Cluster, pod: Object, container: str, query: dict[str, str], until: float) -> list[str]:
    """Last lines of a container's log, asked for until a time of the monotonic clock while the kubelet says that it waits to start."""
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    limits = {"tailLines": str(LOG_LINES), "limitBytes": str(LOG_BYTES), **query}
    while True:
        try:
            return [line async for line in connection.log(namespace, name, container, limits)]
        except ApiError as error:
            if WAITING not in error.message or time.monotonic() >= until:
                raise
        await asyncio.sleep(LOOK_SECONDS)


def _is_full(pieces: list[Piece]) -> bool:
    return sum(len(piece.data) for piece in pieces) > BUNDLE_BYTES_MAX


async def _add_run_folder(connection: Cluster, observed: Observed, redactor: Redactor, missing: list[str], pieces: list[Piece]) -> None:
    """Add the run's folder from one pod, or from every pod when each has a volume of its own; for a job without pods, from short-lived ones
    that mount its claims.
    """
    running = [pod["metadata"]["name"] for pod in observed.pods if is_running(pod)]
    own_volumes = bool((observed.stateful_set or {"spec": {}})["spec"].get("volumeClaimTemplates"))
    for pod in running if own_volumes else running[:1]:
        place = PodPlace(connection, observed.namespace, pod, CONTAINER)
        await _add_from(place, f"{RUN_FOLDER}/{RUN_KEY}", f"run/{pod}" if own_volumes else "run", redactor, missing, pieces)
    if running:
        return
    if observed.stateful_set is None:
        missing.append("logs and stacks of the run's folder: the job has no StatefulSet, which says where that folder is")
        return
    try:
        nodes = await nodes_with_volumes(connection, observed.namespace, observed.name)
        for node in nodes[:READERS_MAX]:
            folder = f"run/{pod_name(observed.name, node)}" if own_volumes else "run"
            async with beside(connection, observed.namespace, observed.name, node, seconds=READER_SECONDS) as place:
                await _add_from(place, run_folder(observed.name), folder, redactor, missing, pieces)
    except (LockstepError, OSError) as error:
        missing.append(f"logs and stacks of the run's folder: {error}")
        return
    if nodes[READERS_MAX:]:
        rest = f"lockstep cp {observed.name}:runs/{observed.name}/logs stacks --node {nodes[READERS_MAX]} -n {observed.namespace}"
        missing.append(f"the run's folder on the volumes of nodes {nodes[READERS_MAX]} to {nodes[-1]}: {rest}")


async def _add_from(place: Place, source: str, folder: str, redactor: Redactor, missing: list[str], pieces: list[Piece]) -> None:
    """Add the run's folder as this container sees it. `source`: the folder, or the file there that names it."""
    if _is_full(pieces):
        missing.append(f"the run's folder as {place.name} has it: {FULL}")
        return
    try:
        limits = str(FILE_BYTES), str(ALL_BYTES)
        data = await python_output(place, source_of(runfiles), source, *limits, seconds=SEND_SECONDS, most=ARCHIVE_BYTES_MAX)
    except (Failed, OSError) as error:
        missing.append(f"the run's folder as {place.name} has it (needs the right to exec into pods): {error}")
        return
    try:
        pieces += [Piece(f"{folder}/{name}", _clean_bytes(redactor, content)) for name, content in _unpacked(data)]
    except Failed as error:
        missing.append(f"the run's folder as {place.name} has it: {error}")


def _unpacked(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Files of the pod's archive: none with a name that leaves the bundle's folder, none that says it is larger than what came.

    Raises ProgramFailed when it is no archive.
    """
    left, last = ALL_BYTES, -1
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for _, entry in zip(range(FILES_MAX), archive, strict=False):
                if entry.offset <= last:  # (a negative size leads Python's tarfile back to where it was)
                    raise tarfile.ReadError("it leads back to its beginning")
                path, last = PurePosixPath(entry.name), entry.offset
                plain = entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and _is_plain(path)
                left -= entry.size if plain else 0
                if plain and 0 <= entry.size <= len(data) and left >= 0 and (file := archive.extractfile(entry)) is not None:
                    yield path.as_posix(), file.read()
    except (tarfile.TarError, ValueError, LookupError, ArithmeticError, EOFError, OSError, MemoryError, RecursionError) as error:
        raise ProgramFailed(f"python3 in the pod did not send a valid archive: {type(error).__name__}: {error}") from None


def _is_plain(path: PurePosixPath) -> bool:
    """Return True if every system that unpacks the bundle makes a file of this name below its folder, and a terminal shows it as it is."""
    name = path.as_posix()
    return (
        not path.is_absolute()
        and ".." not in path.parts
        and printable_line(name) == name
        and not set(name) & set("\t\n\\:")
        and 0 < len(os.fsencode(name)) <= NAME_BYTES_MAX
        and all(len(os.fsencode(part)) <= PART_BYTES_MAX for part in path.parts)
    )


def _yaml(redactor: Redactor, value: Any) -> bytes:
    return str(yaml.safe_dump(redactor.object(value), sort_keys=False, allow_unicode=True)).encode()


def _clean(redactor: Redactor, text: str) -> bytes:
    return str(redactor.object(text)).encode("utf-8", "backslashreplace")


def _clean_bytes(redactor: Redactor, data: bytes) -> bytes:
    """Remove secrets from text; from anything else byte by byte as if it were Latin text, so that the rest stays as it is."""
    try:
        return _clean(redactor, data.decode())
    except UnicodeDecodeError:
        return redactor.text(data.decode("latin-1")).encode("latin-1")


def _write(path: Path, folder: str, pieces: list[Piece]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for piece in pieces:
            entry = tarfile.TarInfo(f"{folder}/{piece.path}")
            entry.size, entry.mtime, entry.mode = len(piece.data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(piece.data))
    path.chmod(0o600)
