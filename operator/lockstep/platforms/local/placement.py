"""Place of a resolved job on this machine: folders for the volumes, loopback for the network, this Python for the image."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from posixpath import join

from lockstep.api.errors import ConfigError
from lockstep.api.job import PreflightMode, TrainingJobSpec
from lockstep.api.names import DATASETS, WORKSPACE
from lockstep.api.shared import Variable
from lockstep.plan.render.machine import machine_variables, on_machine
from lockstep.plan.render.resolved import PlatformDefaults, Resolved
from lockstep.plan.render.run import WILD, Placement, build_run, data_paths, script_paths
from lockstep_gang.contract.preflight import AllReduce, Expected, Kind
from lockstep_gang.contract.run import Run, WhenDone
from lockstep_spec.choices import StorageMode
from lockstep_spec.files import other_interpreter, runs_with
from lockstep_spec.modelnames import is_address, is_folder

LOOPBACK = "127.0.0.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"


def local_defaults(root: Path, uid: str) -> PlatformDefaults:
    """`root`/workspace stands for /workspace and `root`/datasets for /datasets."""
    folder = root.resolve()
    return PlatformDefaults(str(folder / "workspace"), str(folder / "datasets"), uid=uid, image="local")


def local_run(resolved: Resolved, key_file: Path, ports: tuple[int, int], inherited: Mapping[str, str]) -> Run:
    """run.json for processes here; `ports` are the coordinator's and the first of the ranks'.

    Raises ConfigError for a variable that only a cluster could look up.
    """
    placement = Placement(
        addresses=(LOOPBACK,) * resolved.nodes,
        run_dir=str(run_dir(resolved)),
        key_file=str(key_file),
        when_done=WhenDone.EXIT,
        storage=StorageMode.SHARED,
        coordinator_port=ports[0],
        master_port=ports[1],
    )
    run = on_machine(build_run(resolved, placement), sys.executable, environment=variables_here(resolved, inherited))
    return replace(run, preflight=_here(resolved, run.preflight))


def _here(resolved: Resolved, expected: Expected | None) -> Expected | None:
    """Return the cluster without what its file says of pods and network."""
    if expected is None:
        return None
    measured = expected.all_reduce is not None and resolved.job.spec.preflight is PreflightMode.FULL
    return replace(expected, rdma=None, all_reduce=AllReduce() if measured else None)


def run_dir(resolved: Resolved) -> Path:
    return Path(resolved.platform.workspace) / "runs" / resolved.name


def variables_here(resolved: Resolved, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the job's own variables, but which GPUs: each node has its own. The cluster's are for its image and its network, not for this
    machine.
    """
    missing = [name for name in shell_variables(resolved.spec) if name not in inherited]
    if missing:
        raise ConfigError(
            f"spec.env takes {', '.join(missing)} from the cluster, which is not there with --local: set it in this shell instead"
        )
    variables = machine_variables(replace(resolved, nccl={}))
    return {name: value for name, value in variables.items() if name != VISIBLE}


def node_devices(resolved: Resolved, inherited: Mapping[str, str], present: int) -> tuple[str, ...]:
    """CUDA_VISIBLE_DEVICES of each node: the GPUs of this machine, divided. None for a job without GPUs, as in a pod. `present`: how many
    there are.

    Those that spec.env or this shell names in CUDA_VISIBLE_DEVICES are the ones to divide. Raises ConfigError when they are too few.
    """
    own = {variable.name: variable.value for variable in resolved.job.spec.env if variable.value is not None}
    named = own.get(VISIBLE, inherited.get(VISIBLE))
    devices = (
        list(map(str, range(present))) if named is None else [name.strip() for name in named.split(",") if name.strip() not in {"", "-1"}]
    )
    nodes, each = resolved.nodes, resolved.gpus_per_node
    if nodes * each > len(devices):
        available = f"{VISIBLE} names {len(devices)}" if named is not None else f"this machine has {len(devices)}"
        raise ConfigError(
            f"spec.gpusPerNode is {each}, so {nodes} nodes need {nodes * each} GPUs, and {available}: lower gpusPerNode or --nodes (both"
            " run on this machine)"
        )
    return tuple(",".join(devices[node * each : (node + 1) * each]) for node in range(nodes))


def gpus_here(root: Path = Path("/dev")) -> int:
    """NVIDIA GPUs of this machine, as the driver shows them."""
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in root.glob("nvidia*"))


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
    hint = ", or name by --workspace the folder that contains workspace/ and datasets/" if is_mapped else ""
    raise ConfigError(f"{field}: there is no {kind} {path}{mapped}: put it there{hint}")
