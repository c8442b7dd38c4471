"""run.json: settings of the agents on the nodes and of the trainer, and what preflight checks the nodes against."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from posixpath import join
from typing import Any

from lockstep.api import names
from lockstep.api.job import IDLE_SECONDS, JobType, PreflightMode, TrainingJob, TrainingJobSpec
from lockstep.api.quantity import number
from lockstep.api.training import Training
from lockstep.plan.render.fabric import Transport, fabric_asked
from lockstep.plan.render.pod import loader_variables
from lockstep.plan.render.resolved import Resolved
from lockstep_gang.build import build_id
from lockstep_gang.contract.fabric import are_whole_names
from lockstep_gang.contract.interactive import Interactive
from lockstep_gang.contract.preflight import (
    PREFLIGHT_RESULT,
    AllReduce,
    Expected,
    ExpectedPath,
    ExpectedRdma,
    Kind,
    PreflightReport,
    SelfTest,
)
from lockstep_gang.contract.run import HostPlace, JobIdentity, ReportTarget, RestartPolicy, Run, WhenDone
from lockstep_spec.choices import StorageMode, Timeouts
from lockstep_spec.codec import from_json, settings_from_json
from lockstep_spec.modelnames import is_address, is_folder
from lockstep_spec.training import TrainingConfig

LAST_REPORT_SECONDS = 30
"""Part of a pod's grace that is the agent's: to kill ranks that took too long, and to report how the stop went."""
GIGABYTE = 10**9
WILD = set("*?[")
"""Characters that make a data path a pattern."""


@dataclass(frozen=True)
class Placement:
    """Places that run.json names on a platform: node addresses, the job's folder, the key's file, the address for reports."""

    addresses: tuple[str, ...]
    run_dir: str
    key_file: str
    when_done: WhenDone
    storage: StorageMode
    report: ReportTarget | None = None
    coordinator_port: int = names.COORDINATOR_PORT
    master_port: int = names.MASTER_PORT


def pod_placement(resolved: Resolved, report: ReportTarget | None) -> Placement:
    """Placement in pods: DNS names, mounted files, and agents that idle after the end until SIGTERM."""
    return Placement(
        addresses=tuple(names.node_address(resolved.name, node) for node in range(resolved.nodes)),
        run_dir=join(names.WORKSPACE, "runs", resolved.name),
        key_file=join(names.KEY_FOLDER, names.KEY_KEY),
        when_done=WhenDone.WAIT,
        storage=resolved.storage_mode,
        report=report,
    )


def report_target(url: str, ca_pem: str) -> ReportTarget:
    """The operator's endpoint, reported to with the pod's projected token."""
    return ReportTarget(url, ca_pem, join(names.TOKEN_FOLDER, names.TOKEN_KEY))


def build_run(resolved: Resolved, placement: Placement) -> Run:
    """The run of a resolved job. Its variables are in the pod, not here, since some are secrets; but for those that only ranks may have."""
    restart, script, training = resolved.job.spec.restart, resolved.job.spec.script, resolved.job.spec.training
    return Run(
        job=JobIdentity(resolved.name, resolved.namespace, resolved.uid),
        nodes=resolved.nodes,
        ranks_per_node=resolved.ranks_per_node,
        gpus_per_node=resolved.gpus_per_node,
        addresses=placement.addresses,
        coordinator_port=placement.coordinator_port,
        master_port=placement.master_port,
        run_dir=placement.run_dir,
        key_file=placement.key_file,
        command=resolved.command,
        working_directory=resolved.folder,
        local_rank=False if script is None or script.command else script.local_rank,
        environment=loader_variables(resolved),
        restart=RestartPolicy(restart.max_restarts, restart.backoff_seconds, restart.retry),
        when_done=placement.when_done,
        timeouts=_timeouts(resolved.job.spec),
        storage=placement.storage,
        report=placement.report,
        rack_grouped=placement.report is not None and resolved.profile.spec.nodes.rack_label is not None,
        save_grace_seconds=resolved.job.spec.pod_template.grace_seconds - LAST_REPORT_SECONDS,
        training=None if resolved.training is None else training_json(resolved.training),
        base_model="" if training is None else training.model.name,
        fabric=fabric_asked(resolved.job.spec, resolved.profile.spec, resolved.transport, resolved.nccl),
        preflight=expected_by_preflight(resolved),
        interactive=_interactive(resolved.job.spec),
        build=build_id(),
    )


def machine_run(resolved: Resolved, python: str, addresses: Sequence[str], port: int, **changes: Any) -> Run:
    """Return run.json of a node that is no pod, but for its key's file: with its own Python, and without the size of /dev/shm, which is a
    pod's. `port`: the coordinator's; the ranks' is the next one.
    """
    run_dir = join(resolved.platform.workspace, "runs", resolved.name)
    run = build_run(resolved, Placement(tuple(addresses), run_dir, "", WhenDone.EXIT, StorageMode.SHARED, None, port, port + 1))
    command = (python, *run.command[1:]) if run.command[:1] == ("python3",) else run.command
    preflight = None if run.preflight is None else replace(run.preflight, shm_bytes=None)
    return replace(run, **{"command": command, "preflight": preflight, "host": HostPlace()} | changes)


def training_json(training: Training) -> dict[str, Any]:
    """Return the trainer's section of run.json: every field is there, null where unset. It names no Secret: the hub's token is the pod's
    affair.
    """
    return training.model_dump(mode="json", by_alias=True, exclude={"model": {"token_secret"}})


def trainer_config(training: Training) -> TrainingConfig:
    """Return the settings as the trainer reads them."""
    return settings_from_json(TrainingConfig, training_json(training), "training")


def _interactive(spec: TrainingJobSpec) -> Interactive | None:
    if spec.type is not JobType.INTERACTIVE:
        return None
    idle = IDLE_SECONDS if spec.idle_seconds is None else spec.idle_seconds
    return Interactive(idle, warn_seconds=max(idle - 1800, idle // 2))  # half an hour before the release, or after half the time


def _timeouts(spec: TrainingJobSpec) -> Timeouts:
    hang = {} if spec.hang_timeouts is None else spec.hang_timeouts.model_dump(exclude_none=True)
    return Timeouts(start_seconds=spec.start_timeout_seconds, **hang)


def expected_by_preflight(resolved: Resolved) -> Expected | None:
    """Expectations that a job's nodes are checked against. None: preflight is off."""
    mode = resolved.job.spec.preflight
    if mode is PreflightMode.NONE:
        return None
    measures = mode is not PreflightMode.BASIC
    return Expected(
        paths=tuple(expected_paths(resolved)),
        shm_bytes=_shm_bytes(resolved),
        rdma=_rdma(resolved) if resolved.transport is Transport.RDMA else None,
        all_reduce=_all_reduce(resolved) if measures else None,
        self_test=_self_test(resolved) if measures else None,
    )


def _shm_bytes(resolved: Resolved) -> int:
    """Return the size of /dev/shm that a pod gets: the kubelet makes it no larger than the job's own memory."""
    shm, memory = resolved.profile.spec.shm_size, resolved.spec.resources.memory
    return int(min(number(shm), number(memory or shm)))


def with_preflight(job: TrainingJob) -> TrainingJob:
    """The job with its preflight on, whatever it says."""
    if job.spec.preflight is not PreflightMode.NONE:
        return job
    return job.model_copy(update={"spec": job.spec.model_copy(update={"preflight": PreflightMode.AUTO})})


def without_ranks(run: Run, run_dir: str) -> Run:
    """The run without its ranks: it is over when preflight is, and the records in the job's own folder are left alone."""
    assert run.preflight is not None  # noqa: S101 (of a job that `with_preflight` gave)
    command = run.command or ("true",)  # of a dev environment, which starts as any other job for this
    return replace(run, run_dir=run_dir, command=command, interactive=None, preflight=replace(run.preflight, only=True))


def result_in(line: str) -> PreflightReport | None:
    """The result, where this line of node 0's log has it."""
    _, mark, text = line.partition(PREFLIGHT_RESULT)
    try:
        return from_json(PreflightReport, json.loads(text), "preflight result") if mark else None
    except (ValueError, RecursionError):  # (somebody else's line)
        return None


def expected_paths(resolved: Resolved) -> Iterator[ExpectedPath]:
    """Paths that ranks read from the first moment on; the trainer fetches what comes from a hub."""
    training = resolved.training
    if not resolved.command:
        return  # a dev environment: each run looks for its own script
    if training is None:
        yield from script_paths(resolved)
        return
    if is_folder(training.model.name):
        yield ExpectedPath("spec.training.model.name", training.model.name, Kind.FOLDER)
    if training.lora.init_from is not None:
        yield ExpectedPath("spec.training.lora.initFrom", training.lora.init_from, Kind.FOLDER)
    yield from _data_paths(training)
    resume = training.checkpoint.resume_from
    if resume.startswith("/"):
        yield ExpectedPath("spec.training.checkpoint.resumeFrom", resume, Kind.FOLDER)


def script_paths(resolved: Resolved) -> Iterator[ExpectedPath]:
    """Paths of the job's script: the folder, where it is stated, and the file."""
    script = resolved.job.spec.script
    if script is not None and script.folder is not None:
        yield ExpectedPath("spec.script.folder", resolved.folder, Kind.FOLDER)
    if script is not None and script.path is not None:
        yield ExpectedPath("spec.script.path", join(resolved.folder, resolved.command[1]), Kind.FILE)


def _data_paths(training: Training) -> Iterator[ExpectedPath]:
    if training.data.chat_template is not None:
        yield ExpectedPath("spec.training.data.chatTemplate", training.data.chat_template, Kind.FILE)
    for field, path in data_paths(training).items():
        if not is_address(path):
            yield _data_path(field, path)


def data_paths(training: Training) -> dict[str, str]:
    """Return every path or address of samples by its field. Hub datasets have none."""
    paths = {"data.path": training.data.path}
    paths |= {f"data.sources[{index}].path": source.path for index, source in enumerate(training.data.sources)}
    if training.evaluation is not None and training.evaluation.data is not None:
        paths["evaluation.data.path"] = training.evaluation.data.path
    return {f"spec.training.{field}": path for field, path in paths.items() if path is not None}


def _data_path(field: str, path: str) -> ExpectedPath:
    """A file or a folder; of a pattern, the folder below which it is looked for."""
    parts = PurePosixPath(path).parts
    wild = next((number for number, part in enumerate(parts) if WILD & set(part)), None)
    if wild is None:
        return ExpectedPath(field, path, Kind.FILE, or_folder=True)
    return ExpectedPath(field, str(PurePosixPath(*parts[:wild])), Kind.FOLDER)


def _rdma(resolved: Resolved) -> ExpectedRdma:
    network = resolved.profile.spec.network
    rdma = network.rdma
    devices = {device.partition(":")[0] for device in rdma.devices}  # (two ports are one device)
    return ExpectedRdma(
        devices=tuple(rdma.devices),
        count=(len(devices) if are_whole_names(devices) else 0) or len(rdma.rails) or None,
        gid_index=rdma.gid_index,
        interfaces=tuple(rdma.interfaces),
        mtu=network.mtu,
        rate=rdma.rate,
    )


def _all_reduce(resolved: Resolved) -> AllReduce | None:
    """All-reduce to measure, between nodes only: within one there is no network."""
    requested = resolved.job.spec.preflight is PreflightMode.FULL
    stated = resolved.profile.spec.network.minimum_busbw
    threshold = int(float(stated) * GIGABYTE) if stated is not None and _profile_speaks_of(resolved) else None
    return AllReduce(threshold) if resolved.nodes > 1 and (requested or threshold is not None) else None


def _self_test(resolved: Resolved) -> SelfTest | None:
    is_made = resolved.job.spec.preflight is PreflightMode.FULL or resolved.gpus_per_node > 0
    precision = "" if resolved.training is None else resolved.training.precision.value
    return SelfTest(precision) if is_made else None


def _profile_speaks_of(resolved: Resolved) -> bool:
    """The cluster's threshold is that of its own GPUs over its own network: CPU ranks, or TCP by choice, can't reach it."""
    profile = resolved.profile.spec
    same_ranks = (resolved.gpus_per_node > 0) == (profile.gpus.per_node > 0)
    return same_ranks and (resolved.transport is Transport.RDMA or not profile.network.rdma.enabled or resolved.gpus_per_node == 0)
