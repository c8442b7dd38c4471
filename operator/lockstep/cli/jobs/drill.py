"""`lockstep drill FAULT --job NAME`: hurt a running job on purpose, and see how soon it is well again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError
from lockstep.cli.shared.jobargs import Form, FormOption, TargetOptions, find_job, on_site
from lockstep.cli.shared.signals import exiting_on_ctrl_c
from lockstep.cli.shared.terminal import confirm
from lockstep.plan.pages.drill import AFTER_INTERRUPT, AFTER_WITHOUT_PODS, RISKS, RISKS_WITHOUT_PODS, Fault, drill_page, why_not_now
from lockstep.platforms.output import put, put_json, say
from lockstep.platforms.places.drilledjob import DrilledJob
from lockstep.platforms.places.drills import missing_rights, run_drill

if TYPE_CHECKING:
    from lockstep.platforms.places.backend import Job

MIB = 1 << 20


@on_site
def drill(
    where: TargetOptions,
    fault: Annotated[Fault, typer.Argument(help="The fault to inject.", show_default=False)],
    job: Annotated[str, typer.Option("--job", help="The job's name.", show_default=False)],
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="The rank to hit, or the rank whose node to hit. Default: the last rank.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    timeout: Annotated[int, typer.Option("--timeout", min=10, help="Seconds to wait for the recovery.")] = 600,
    fill_at_most: Annotated[
        int,
        typer.Option("--fill-at-most", min=1, metavar="MIB", help="For fill-disk: refuse a volume that has more than this many MiB free."),
    ] = 1024,
    output: FormOption = Form.TEXT,
) -> None:
    """Inject a fault into a running job and time its recovery.

    It waits until the job trains again, and reports detection, downtime and lost steps.

    On a cluster it says which rights it needs, and does nothing without them. However it ends, it undoes what it did to ranks, nodes and
    volumes. Exit code 0: recovered; 1: not; 2: nothing was done.

    Example: lockstep drill kill-rank --job demo --cluster lab
    """
    found = find_job(job, where)
    found.backend.refuse(fault)
    if found.pods is not None and (missing := missing_rights(found.pods.client, fault, found.pods.namespace)):
        needs = f"{fault} needs rights that your account does not have, and nothing was done"
        raise ConfigError(f"{needs}: {'; '.join(map(str, missing))}: ask an administrator")
    reason = why_not_now(found.job, fault)
    if reason:
        raise ConfigError(f"{fault} on job {job}: {reason}")
    _ask(found, fault, yes=yes)
    drilled = DrilledJob(found, found.status, timeout, say)
    last = int(found.status["ranks"]["desired"]) - 1
    after = AFTER_WITHOUT_PODS if found.pods is None else AFTER_INTERRUPT
    message = f"lockstep: interrupted: {after[fault]}; see it with: lockstep get {found.at}"
    with exiting_on_ctrl_c(message):
        outcome = run_drill(drilled, fault, last if rank is None else rank, fill_at_most * MIB)
    if output is Form.JSON:
        put_json(outcome.as_json())
    else:
        put(*drill_page(outcome).splitlines())


def _ask(job: Job, fault: Fault, *, yes: bool) -> None:
    risks = RISKS_WITHOUT_PODS if job.pods is None else RISKS
    from_commit = " from the last commit" if "lastCommittedStep" in (job.status.get("checkpoint") or {}) else ""
    risk = f"{fault} on job {job.name} {job.backend.words.where} {risks[fault].format(from_commit=from_commit)}."
    if not yes:
        confirm(f"{risk} Do it?", f"{risk} Use --yes to do it")
