"""`lockstep cluster lint`: what a cluster file says that can't be right, by itself and held against the cluster."""

from __future__ import annotations

import asyncio
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import OPERATOR_NAME
from lockstep.cli.shared.clusterfiles import file_of
from lockstep.cli.shared.jobargs import Form, FormOption, OptionalClusterArgument, TargetOptions, on_cluster
from lockstep.cli.shared.target import OtherCluster, load
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.plan.checks.alone import lint_alone
from lockstep.plan.checks.lint import lint_against
from lockstep.plan.cluster.finding import Finding, Outcome, line_of
from lockstep.plan.cluster.scope import image_of
from lockstep.platforms.clusters.facts import lint_facts
from lockstep.platforms.output import put, put_json, tell
from lockstep_spec.words import number_of

if TYPE_CHECKING:
    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.kube.aim import Connections
    from lockstep.plan.cluster.facts import ClusterFacts


@on_cluster
def lint(
    where: TargetOptions,
    cluster: OptionalClusterArgument = "local",
    offline: Annotated[bool, typer.Option("--offline", help="Check the file alone, without asking a cluster.")] = False,
    output: FormOption = Form.TEXT,
) -> None:
    """Check a cluster file, also against its cluster.

    It checks rails, storage classes, HCAs, GID, MTU, SCC, quota and nodes. Each finding has its line and what to do.

    It changes nothing: it reads with your rights, and tries out one pod by a dry run. What you may not see is unknown. Exit code 1:
    something fails, or the cluster doesn't answer.

    Example: lockstep cluster lint barcelona --offline
    """
    from lockstep.cli.clusters.deploymentplan import default_image, unpullable

    file, typed = load(where.verb, cluster), shlex.quote(cluster)
    against: list[Finding] = []
    unanswered: Failed | ConfigError | None = None
    operator_image = default_image(file.profile)
    if not offline and file.hosts is not None:
        tell(
            f"note: the file alone was checked; lockstep doctor {typed} looks at the hosts, and lockstep hosts setup {typed} --dry-run"
            " shows what they lack"
        )
    elif not offline:
        try:
            facts = asyncio.run(_look(file, where.namespace, where.connections))
            against = list(lint_against(file, facts))
            deployment = facts.object("Deployment", OPERATOR_NAME).first
            operator_image = operator_image if deployment is None else image_of(deployment)
            against += [
                one for one in [unpullable(file, typed)] if one and deployment is None and facts.object("Deployment", OPERATOR_NAME).seen
            ]
        except (Failed, ConfigError) as error:  # findings about the file alone are shown all the same
            unanswered = error
    findings = [*lint_alone(file, operator_image, typed), *against]
    _show(findings, file_of(cluster), file, as_json=output is Form.JSON)
    if unanswered is not None:
        raise unanswered
    if any(finding.outcome is Outcome.FAILED for finding in findings):
        raise typer.Exit(1)


async def _look(file: ClusterFile, namespace: str | None, connections: Connections) -> ClusterFacts:
    try:
        cluster = await Cluster.connect(connections)
    except OtherCluster as error:
        raise Failed(f"only the file was checked: {error}; --offline asks no cluster") from None
    async with cluster as connection:
        try:
            return await lint_facts(connection, file.profile.spec, namespace or file.cluster.namespace)
        except (ApiError, OSError) as error:
            raise Failed(
                f"only the file was checked: {connection.server} doesn't answer as it should: {error}; --offline asks no cluster"
            ) from None


def _show(findings: list[Finding], path: str, file: ClusterFile, *, as_json: bool) -> None:
    rows = [
        {
            "verdict": one.outcome.value,
            "file": path,
            "line": line_of(one.subject, file.lines),
            "key": one.subject,
            "message": one.message,
            "fix": one.fix,
        }
        for one in findings
    ]
    if as_json:
        put_json(rows)
        return
    for row in rows:
        put(f"{row['verdict']:8} {path}:{row['line']}: {row['key']}: {row['message']}")
        if row["fix"]:
            put(f"{'':8} → {row['fix']}")
    bad = sum(row["verdict"] in ("failed", "warning") for row in rows)
    put(f"{number_of(len(rows), 'finding')}, {bad} to fix" if bad else "nothing to fix")
