"""The newest adapter of a job, where its files are: the exported one, or one made of the newest commit's shards on the spot."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from posixpath import join, normpath

from lockstep.api.errors import Failed
from lockstep.api.names import WORKSPACE
from lockstep.kube.cluster import Cluster
from lockstep.kube.exec import Place, ProgramFailed, output_of, python_output
from lockstep.platforms.inpod import newest, source_of
from lockstep.platforms.inpod.newest import CONFIG, WEIGHTS

EXPORT_SECONDS = 1800.0
ANSWER_BYTES_MAX = 1 << 16
TEMPORARY = "/tmp"  # noqa: S108 (the pod's own emptyDir)


class NoAdapter(Failed):
    """The job has left no adapter, or none that can be read here. The message says what to do."""


@dataclass(frozen=True)
class Adapter:
    """A folder in a pod."""

    folder: str
    files: tuple[str, ...]
    """What belongs to it: a commit's folder holds shards, too. () for all."""
    made_of: str | None = None
    """The commit that it was made of just now; None: a run exported it."""


def run_folder(job: str) -> str:
    """Where a job's pods keep their run."""
    return join(WORKSPACE, "runs", job)


async def newest_adapter(cluster: Cluster, place: Place, job: str) -> Adapter:
    """Raises NoAdapter."""
    run = run_folder(job)
    answer = await python_output(cluster, place, source_of(newest), run)
    exported, commit = _folders(answer, run, place.pod)
    if commit is not None:
        return await _exported(cluster, place, job, commit)
    if exported is None:
        raise NoAdapter(f"{run} in pod {place.pod} has no adapter and no commit: lockstep why {job} tells how far the job has come")
    in_commit = "/checkpoints/" in exported
    return Adapter(exported, (CONFIG, WEIGHTS) if in_commit else ())


def _folders(answer: bytes, run: str, pod: str) -> tuple[str | None, str | None]:
    """(adapter, commit) as `newest.py` prints them. Raises NoAdapter unless both are None or folders of the run."""
    try:
        found = json.loads(answer[:ANSWER_BYTES_MAX])
        folders = found["adapter"], found["commit"]
    except (ValueError, KeyError, TypeError, RecursionError):
        folders = ("", "")
    for folder in folders:
        if folder is not None and not (isinstance(folder, str) and normpath(folder) == folder and folder.startswith(f"{run}/")):
            raise NoAdapter(
                f"python3 in pod {pod} doesn't say which adapter of {run} is the newest, but {answer[:100]!r}: look at the image's python3"
            )
    return folders


async def _exported(cluster: Cluster, place: Place, job: str, commit: str) -> Adapter:
    """By the trainer's own program, which reads shards one parameter at a time, on a CPU."""
    folder = join(TEMPORARY, f"lockstep-adapter-{secrets.token_hex(4)}")
    command = ["python3", "-m", "lockstep_train.export", commit, "--output", folder]
    try:
        await output_of(cluster, place, command, seconds=EXPORT_SECONDS)
    except ProgramFailed as error:
        raise NoAdapter(
            f"the newest commit is not exported yet, and can't be here: {error}; fetch the checkpoints of every node and export them: "
            f"lockstep cp {job}:{run_folder(job)}/checkpoints node-0 --node 0 (and so on), then lockstep adapter export node-0 … -o adapter"
        ) from None
    return Adapter(folder, (), made_of=commit)
