"""Inputs and variables that a job needs of this machine, whose folders stand for its volumes; and the lock of its run."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from posixpath import join

from lockstep.api.errors import ConfigError
from lockstep.api.job import TrainingJob, TrainingJobSpec
from lockstep.api.names import ANNOTATION_TYPED, DATASETS, DELETED, WORKSPACE
from lockstep.api.shared import Variable
from lockstep.plan.render.resolved import Resolved
from lockstep.plan.render.run import WILD, data_paths, script_paths
from lockstep_gang.contract.preflight import Kind
from lockstep_spec.files import other_interpreter, runs_with
from lockstep_spec.modelnames import is_address, is_folder

LOCK = "local.lock"
"""A file in the run's folder: the process that runs it, which holds its lock, and the command that starts it again."""


def run_dir(resolved: Resolved) -> Path:
    return Path(resolved.platform.workspace) / "runs" / resolved.name


def shell_variables(spec: TrainingJobSpec) -> tuple[str, ...]:
    """Variables that the job takes from the cluster: where there is none, the shell must have them."""
    return tuple(variable.name for variable in spec.env if _is_needed(variable))


def _is_needed(variable: Variable) -> bool:
    """Return True if a pod would not start without it: it comes from the cluster, and is not said to be optional."""
    source = variable.value_from
    reference = (source.secret_key_ref or source.config_map_key_ref) if source is not None else None
    return source is not None and not (reference is not None and reference.optional)


def check_inputs(resolved: Resolved) -> None:
    """Everything the job reads is there. Raises ConfigError with one sentence for the first that isn't."""
    _check_script(resolved)
    training = resolved.training
    if training is not None:
        model = Path(training.model.name)
        stated = resolved.job.spec.training
        assert stated is not None  # noqa: S101 (resolved.training comes from it)
        if is_folder(stated.model.name):
            _require("spec.training.model.name", stated.model.name, model, model.is_dir(), "folder")
            _require_file("spec.training.model.name", f"{stated.model.name}/config.json", model / "config.json")
        here = data_paths(training)
        for field, path in data_paths(stated).items():
            if not is_address(path):
                _require_data(field, path, Path(here[field]))
        if stated.data.chat_template is not None and training.data.chat_template is not None:
            _require_file("spec.training.data.chatTemplate", stated.data.chat_template, Path(training.data.chat_template))
        resume = training.checkpoint.resume_from
        if resume.startswith("/"):
            _require("spec.training.checkpoint.resumeFrom", stated.checkpoint.resume_from, Path(resume), Path(resume).is_dir(), "folder")


def _check_script(resolved: Resolved) -> None:
    script = resolved.job.spec.script
    for needed in script_paths(resolved):
        path, is_file = Path(needed.path), needed.kind is Kind.FILE
        stated = script and (join(script.folder or "", script.path or "") if is_file else script.folder)
        _require(needed.field, stated or "", path, path.is_file() if is_file else path.is_dir(), needed.kind.value.lower())
        if is_file and (interpreter := other_interpreter(path)):
            raise ConfigError(
                f"{needed.field}: {path} is a program of {interpreter}, which Python can't read: {runs_with(interpreter, stated or '')}"
            )


def _require_data(field: str, stated: str, path: Path) -> None:
    """A file, a folder, or a pattern of which a file is there."""
    pattern = bool(WILD & set(stated)) and not path.exists()
    exists = any(Path(path.anchor).glob(str(path.relative_to(path.anchor)))) if pattern else path.exists()
    _require(field, stated, path, exists, "file that matches" if pattern else "file or folder")


def _require_file(field: str, stated: str, path: Path) -> None:
    _require(field, stated, path, path.is_file(), "file")


def _require(field: str, stated: str, path: Path, exists: bool, kind: str) -> None:
    if exists:
        return
    mapped = f" ({stated} of the job)" if str(path) != stated else ""
    is_mapped = stated.startswith((f"{WORKSPACE}/", f"{DATASETS}/")) or not stated.startswith("/")
    hint = ", or name by --cluster the folder that contains workspace/ and datasets/" if is_mapped else ""
    raise ConfigError(f"{field}: there is no {kind} {path}{mapped}: put it there{hint}")


@contextlib.contextmanager
def alone(folder: Path, job: TrainingJob | None = None) -> Iterator[int]:
    """Keep other runs of this job off this machine meanwhile: as long as the descriptor is open anywhere. Raises ConfigError when there is
    one.

    The file keeps the command that starts the `job` again.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a+")
    except OSError as error:
        raise ConfigError(f"cannot write in {folder} ({error.strerror}): name another folder by --cluster") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"this job already runs here, in {folder}: wait for it, or stop it with Ctrl-C") from None
        (folder / DELETED).unlink(missing_ok=True)
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n{'' if job is None else job.metadata.annotations.get(ANNOTATION_TYPED, '')}\n")
        lock.flush()
        yield lock.fileno()
