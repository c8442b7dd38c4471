"""run.json: what the agents on the nodes and the trainer are told."""

from __future__ import annotations

from dataclasses import dataclass
from posixpath import join
from typing import Any

from lockstep.api import names
from lockstep.api.job import Interactive as InteractiveSpec
from lockstep.api.job import JobType, TrainingJobSpec
from lockstep.api.training import Training
from lockstep.plan.render.fabric import fabric_asked
from lockstep.plan.render.pod import loader_variables
from lockstep.plan.render.preflight import expected
from lockstep.plan.render.resolved import Resolved
from lockstep_gang.contract.interactive import Interactive
from lockstep_gang.contract.run import JobIdentity, ReportTarget, RestartPolicy, Run, WhenDone
from lockstep_spec.choices import StorageMode
from lockstep_spec.codec import settings_from_json
from lockstep_spec.timeouts import Timeouts
from lockstep_spec.training import TrainingConfig

LAST_REPORT_SECONDS = 30
"""Part of a pod's grace that is the agent's: to kill ranks that took too long, and to report how the stop went."""


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
        addresses=tuple(names.node_address(resolved.name, resolved.namespace, node) for node in range(resolved.nodes)),
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
    restart = resolved.job.spec.restart
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
        working_directory=resolved.platform.workspace,
        environment=loader_variables(resolved),
        restart=RestartPolicy(restart.max_restarts, restart.backoff_seconds, restart.retry),
        when_done=placement.when_done,
        timeouts=_timeouts(resolved.job.spec),
        storage=placement.storage,
        report=placement.report,
        rack_grouped=placement.report is not None and resolved.profile.spec.nodes.rack_label is not None,
        save_grace_seconds=resolved.job.spec.pod_template.grace_seconds - LAST_REPORT_SECONDS,
        training=None if resolved.training is None else training_json(resolved.training),
        fabric=fabric_asked(resolved.job.spec, resolved.profile.spec, resolved.transport, resolved.nccl),
        preflight=expected(resolved),
        interactive=_interactive(resolved.job.spec),
    )


def training_json(training: Training) -> dict[str, Any]:
    """Return the trainer's section of run.json: every field is there, null where unset. It names no Secret: the hub's token is the pod's affair."""
    return training.model_dump(mode="json", by_alias=True, exclude={"model": {"token_secret"}})


def trainer_config(training: Training) -> TrainingConfig:
    """Return the settings as the trainer reads them."""
    return settings_from_json(TrainingConfig, training_json(training), "training")


def _interactive(spec: TrainingJobSpec) -> Interactive | None:
    if spec.type is not JobType.INTERACTIVE:
        return None
    stated = spec.interactive or InteractiveSpec()
    return Interactive(stated.idle_seconds, stated.warns_after_seconds)


def _timeouts(spec: TrainingJobSpec) -> Timeouts:
    """Lockstep's trainer tells its own limits with what it does, so that only the start's is left to say."""
    hang = {} if spec.hang_timeouts is None else spec.hang_timeouts.model_dump()
    return Timeouts(start_seconds=spec.start_timeout_seconds, **hang)
