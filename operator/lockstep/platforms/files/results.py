"""Results of a run on its volume: its commits and its newest adapter. A pod reads them there, so that only answers travel."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from posixpath import join, normpath
from typing import Any

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import WORKSPACE
from lockstep.api.objects import Object, has_ended
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.kube.exec import PodPlace
from lockstep.plan.render.readerpod import is_shared
from lockstep.platforms.files.reader import Say, reader, running_pods, stateful_set_of
from lockstep.platforms.inpod import newest, source_of
from lockstep.programs import Place, ProgramFailed, output_of, python_output
from lockstep_spec.exits import CONFIGURATION

INSPECT_MODULE, MERGE_MODULE = "lockstep_train.inspect", "lockstep_train.merge"
COMMITS_BYTES_MAX = 64 << 20
BAD_NEWS = 1
EXPORT_SECONDS = 1800.0
ANSWER_BYTES_MAX = 1 << 16
TEMPORARY = "/tmp"  # noqa: S108 (the pod's own emptyDir)


class NoAdapter(Failed):
    """The job has left no adapter, or none that can be read here. The message says what to do."""


@dataclass(frozen=True)
class Adapter:
    """A folder in a pod."""

    folder: str
    made_of: str | None = None
    """The commit that it was made of just now; None: a run exported it."""


def run_folder(job: str) -> str:
    """Folder in which a job's pods keep their run."""
    return join(WORKSPACE, "runs", job)


async def inspected(place: Place, verb: str, folder: str, options: Sequence[str]) -> tuple[str, int]:
    """Output of the trainer's program about a run's folder there, and its exit code: 0, or 1 for an answer that is bad news.

    Raises ConfigError for a folder that is no run's, ProgramFailed.
    """
    answer = bytearray()
    async with place.program([*place.python, "-m", INSPECT_MODULE, verb, folder, *options], stdin=False, pings=True) as running:
        while data := await running.read():
            answer += data
            if len(answer) > COMMITS_BYTES_MAX:
                raise ConfigError(f"{place.name}: {INSPECT_MODULE} prints more than {COMMITS_BYTES_MAX} bytes, which is not a valid answer")
        if running.code == CONFIGURATION:
            raise ConfigError(str(running.failure()).replace(": lockstep: ", ": ", 1))
        if running.code != 0 and not (running.code == BAD_NEWS and answer):
            raise running.failure()
        return answer.decode(errors="replace"), BAD_NEWS if running.code else 0


async def newest_adapter(place: Place, job: str, run: str = "", again: str = "") -> Adapter:
    """Newest adapter of the job, exported on the spot if it is only in a commit's shards.

    `run`: its folder there, by default the one that pods have. `again`: words that lead to the job on a command line. Raises NoAdapter.
    """
    folder, is_commit = await _newest(place, job, run or run_folder(job), again)
    return await _exported(place, job, folder, again) if is_commit else Adapter(folder)


async def _newest(place: Place, job: str, run: str, again: str) -> tuple[str, bool]:
    """Return the folder of the newest adapter, or of a commit that is newer, and whether it is a commit. Raises NoAdapter."""
    exported, commit = _folders(await python_output(place, source_of(newest), run), run, place.name)
    folder = commit or exported
    if folder is None:
        line = f"lockstep why {f'{job} {again}'.rstrip()}"
        raise NoAdapter(f"{run} in {place.name} has no adapter and no commit: {line} tells how far the job has come")
    return folder, commit is not None


@asynccontextmanager
async def merged_of(
    job: str, place: Place, run: str, again: str, options: Sequence[str], show: Callable[[bytes], Any]
) -> AsyncIterator[str]:
    """Yield the folder of a whole model, which the trainer's program makes of the job's newest weights. It stands beside the run, since it
    may be as large as the base model, and is removed. Raises NoAdapter, ProgramFailed.
    """
    source, _ = await _newest(place, job, run, again)
    folder = join(run, f".merged-{secrets.token_hex(4)}")
    try:
        await write_on(place, [MERGE_MODULE, source, "--output", folder, *options], show)
        yield folder
    finally:
        await output_of(place, ["rm", "-rf", "--", folder])


def _folders(answer: bytes, run: str, where: str) -> tuple[str | None, str | None]:
    """Adapter and commit as `newest.py` prints them. Raises NoAdapter unless each is None or a folder of the run."""
    try:
        answered = json.loads(answer[:ANSWER_BYTES_MAX])
        folders = answered["adapter"], answered["commit"]
    except (ValueError, KeyError, TypeError, RecursionError):
        folders = ("", "")
    for folder in folders:
        if folder is not None and not (isinstance(folder, str) and normpath(folder) == folder and folder.startswith(f"{run}/")):
            raise NoAdapter(f"python3 in {where} doesn't say which adapter of {run} is the newest, but {answer[:100]!r}: check its python3")
    return folders


async def _exported(place: Place, job: str, commit: str, again: str) -> Adapter:
    """Export the commit by the trainer's own program, which reads shards one parameter at a time, on a CPU. Raises NoAdapter."""
    folder = join(TEMPORARY, f"lockstep-adapter-{secrets.token_hex(4)}")
    command = [*place.python, "-m", "lockstep_train.proof", commit, "--output", folder]
    try:
        await output_of(place, command, seconds=EXPORT_SECONDS)
    except ProgramFailed as error:
        raise NoAdapter(
            f"the newest commit is not exported yet, and can't be here: {error}; fetch the checkpoints of every node and export them:"
            f" lockstep cp {job}:{run_folder(job)}/checkpoints node-0 --node 0{again and f' {again}'} (and so on), then lockstep adapter"
            " export node-0 … -o adapter"
        ) from None
    return Adapter(folder, made_of=commit)


@asynccontextmanager
async def adapter_of(job: str, place: Place, run: str, again: str) -> AsyncIterator[Adapter]:
    """Yield the job's `newest_adapter`. One that was exported just now is removed: the temporary folder may not end with the place."""
    adapter = await newest_adapter(place, job, run, again)
    try:
        yield adapter
    finally:
        if adapter.made_of is not None:
            await output_of(place, ["rm", "-r", "--", adapter.folder])


@asynccontextmanager
async def idle_or_own_pod(cluster: Cluster, namespace: str, job: str, gpus: int, say: Say) -> AsyncIterator[PodPlace]:
    """Container for the generation. Beside ranks that train there would be neither memory nor time for it. Raises ConfigError, NoReader."""
    stateful_set = await stateful_set_of(cluster, namespace, job)
    running = await running_pods(cluster, namespace, job)
    if 0 in running and await _is_idle(cluster, namespace, job):
        yield running[0]
        return
    busy = running.get(0)
    if busy is not None and not is_shared(stateful_set):
        raise ConfigError(
            f"pod {busy.pod} trains, and a second pod may not be able to mount its volume: wait for the job's end, or fetch the adapter"
            f" (lockstep adapter get {job} ./adapter), and name that folder"
        )
    async with reader(cluster, stateful_set, 0, resources=resources_of(stateful_set, gpus), say=say) as place:
        yield place


async def _is_idle(cluster: Cluster, namespace: str, job: str) -> bool:
    """Return True if nothing trains in its pods: the job is interactive, or has ended and is held."""
    try:
        training_job = await cluster.get("TrainingJob", namespace, job)
    except ApiError:  # (a cluster without the operator)
        return False
    status = (training_job or {}).get("status") or {}
    return training_job is not None and (training_job["spec"].get("type") == "Interactive" or has_ended(status))


def resources_of(stateful_set: Object, gpus: int) -> Object:
    """Resources: CPU and memory as the job's pods have them, and `gpus` GPUs."""
    from lockstep.plan.render.fabric import GPU_RESOURCE

    stated = stateful_set["spec"]["template"]["spec"]["containers"][0].get("resources") or {}
    devices = {GPU_RESOURCE: str(gpus)} if gpus else {}
    return {
        kind: {k: v for k, v in (stated.get(kind) or {}).items() if k in ("cpu", "memory")} | devices for kind in ("requests", "limits")
    }


async def write_on(place: Place, arguments: Sequence[str], show: Callable[[bytes], Any]) -> None:
    """Run a module of the trainer, and show what it writes as it comes. Raises ProgramFailed with its message."""
    async with place.program([*place.python, "-m", *arguments], stdin=False, pings=True) as running:
        while text := await running.read():
            show(text)
        if running.code != 0:
            raise running.failure()
