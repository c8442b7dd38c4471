"""Options of verbs about a job on a cluster: its name, where it is, and which of its pods. `find_job` turns them into a connection and the
job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.api.errors import ConfigError, Failed, LockstepError
from lockstep.api.names import DEV_ENVIRONMENT, pod_name
from lockstep.cli.shared import localsite

if TYPE_CHECKING:
    from lockstep.cli.shared.hostsite import HostSite
    from lockstep.cli.shared.kubesite import ClusterJob
    from lockstep.cli.shared.site import Site, SiteJob
    from lockstep.cli.shared.target import Target


def known_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return what a shell completes a job's name to; nothing where nothing can be asked: a shell that completes must not complain."""
    from lockstep.cli.shared.target import one_verb
    from lockstep.kube.jobs import list_jobs

    options = context.params
    try:
        with one_verb():
            target = TargetOptions.of(options.get("cluster"), options.get("namespace"), options.get("context")).target()
        names = [str(job["metadata"]["name"]) for job in list_jobs(target.client, target.namespace)]
    except (LockstepError, OSError):
        return []
    return sorted(name for name in names if name.startswith(incomplete))


def unless_said(context: typer.Context, parameter: typer.CallbackParam, value: str) -> str:
    """Return the cluster that was named, else the one that is meant where none is: with --everywhere none."""
    source = context.get_parameter_source(parameter.name or "")
    if source is None or source.name != "DEFAULT" or context.params.get("local"):
        return value
    if context.params.get("everywhere"):
        return ""
    from lockstep.cli.shared.target import unnamed_cluster

    return unnamed_cluster(context.params.get("context"))


UNNAMED = "Default: the one in use (lockstep use), else local."
JobsArgument = Annotated[list[str], typer.Argument(help="The jobs' names.", show_default=False, autocompletion=known_names)]
JobArgument = Annotated[str, typer.Argument(help="The job's name.", show_default=False, autocompletion=known_names)]
ClusterNameOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        callback=unless_said,
        show_default=False,
        help=f"A cluster of clusters/, or a cluster file's path: it states the namespace and the API server. {UNNAMED}",
    ),
]
OptionalClusterArgument = Annotated[
    str, typer.Argument(callback=unless_said, show_default=False, help=f"A cluster of clusters/, or a cluster file's path. {UNNAMED}")
]
OptionalJobArgument = Annotated[str, typer.Argument(help="The job's name.", metavar="[JOB]", autocompletion=known_names)]
NodeOption = Annotated[int, typer.Option("--node", min=0, help="The node, and so the pod. The first is 0, the default.")]
DEFAULT_JOB = DEV_ENVIRONMENT
NamespaceOption = Annotated[
    str | None,
    typer.Option("-n", "--namespace", help="The namespace. Default: the cluster file's, or the context's if there is no file."),
]
ContextOption = Annotated[str | None, typer.Option("--context", help="The context of your kubeconfig. Default: the current one.")]


WORKSPACE = localsite.DEFAULT
LocalOption = Annotated[
    bool, typer.Option("--local", help="Take a run of `lockstep run --local` on this machine instead of a job on a cluster.")
]
WorkspaceOption = Annotated[Path, typer.Option("--workspace", help="With --local: the same as for `lockstep run`.")]


@dataclass(frozen=True)
class TargetOptions:
    """Options of a verb about what is on a cluster: a cluster file's name or path, a namespace, a context of the kubeconfig."""

    cluster: ClusterNameOption = "local"
    namespace: NamespaceOption = None
    context: ContextOption = None

    @classmethod
    def of(cls, cluster: str | None, namespace: str | None, context: str | None) -> TargetOptions:
        """Return them with the cluster that is meant where none is named."""
        from lockstep.cli.shared.target import unnamed_cluster

        return cls(cluster or unnamed_cluster(context), namespace, context)

    def target(self) -> Target:
        from lockstep.cli.shared.target import target_of

        return target_of(self.cluster, self.namespace, self.context)

    def site(self) -> Site:
        """Return where jobs are: the hosts of a cluster file, a namespace, or the workspace of this machine that is in use."""
        from lockstep.cli.shared.clusterfiles import is_workspace
        from lockstep.cli.shared.kubesite import KubeSite

        if is_workspace(self.cluster):
            if self.namespace:
                raise ConfigError(
                    f"{self.cluster} is a workspace of this machine, which has no namespaces: leave out -n, or name a cluster by --cluster"
                )
            return _of_workspace(Path(self.cluster))
        return self.hosts() or KubeSite(self.target())

    def hosts(self) -> HostSite | None:
        """Return the hosts of the cluster file that is named; None for a Kubernetes cluster."""
        from lockstep.cli.shared.target import hosts_of, tell_place

        cluster_file = hosts_of(self.cluster)
        if cluster_file is None:
            return None
        from lockstep.cli.shared.hostsite import HostSite

        if self.namespace or self.context:
            raise ConfigError(
                f"{self.cluster} is a cluster of hosts: they have no namespace and no kubeconfig, so leave out -n and --context"
            )
        site = HostSite(cluster_file, self.cluster)
        tell_place(site.where)
        return site

    def chosen_namespace(self) -> str:
        from lockstep.cli.shared.target import namespace_of

        return namespace_of(self.cluster, self.namespace, self.context)


@dataclass(frozen=True)
class SiteOptions(TargetOptions):
    """Options of a verb about a job, wherever it is: as of TargetOptions, or a run on this machine."""

    local: LocalOption = False
    workspace: WorkspaceOption = WORKSPACE

    def site(self) -> Site:
        return _of_workspace(self.workspace) if self.local else super().site()


def _of_workspace(folder: Path) -> localsite.LocalSite:
    from lockstep.cli.shared.target import tell_place

    site = localsite.LocalSite(folder)
    tell_place(site.where)
    return site


def on_cluster(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the options of TargetOptions, after its own: it gets them as its first argument. (typer knows no bundles of options.)"""
    return _with_bundle(verb, TargetOptions)


def on_site(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the options of SiteOptions, as `on_cluster` does."""
    return _with_bundle(verb, SiteOptions)


def _with_bundle(verb: Callable[..., None], kind: type[TargetOptions]) -> Callable[..., None]:
    own, bundle = signature(verb, eval_str=True), signature(kind, eval_str=True).parameters

    @wraps(verb)
    def with_options(**options: Any) -> None:
        where = kind(**{name: options.pop(name) for name in bundle if name in options})
        verb(where, **options)

    parameters = [*list(own.parameters.values())[1:], *bundle.values()]
    vars(with_options)["__signature__"] = own.replace(parameters=parameters)
    return with_options


def limit_option(what: str) -> Any:
    """Return the option that limits a short run of pods."""
    return typer.Option("--timeout", min=1, help=f"{what} Default: 900, without waiting for nodes that the cluster doesn't have.")


HereOption = Annotated[bool, typer.Option("--local", help="Run as processes on this machine, without a cluster or root.")]
VolumesOption = Annotated[
    Path, typer.Option("--workspace", help="With --local: the folder whose workspace/ and datasets/ stand for /workspace and /datasets.")
]


class ListForm(StrEnum):
    """Form of an answer about several things."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


ListFormOption = Annotated[ListForm, typer.Option("-o", "--output", help="table, wide, json, yaml or name.")]


class Form(StrEnum):
    """Form of an answer about one thing."""

    TEXT = "text"
    JSON = "json"


FormOption = Annotated[Form, typer.Option("-o", "--output", help="text or json.")]


def find_job(name: str, where: TargetOptions) -> SiteJob:
    """Return the job, wherever it is. Raises ConfigError, naming the jobs that are there, when there is none of this name."""
    return where.site().job(name)


def find_jobs(names: Sequence[str], where: TargetOptions) -> list[SiteJob]:
    """Return each job once, in the order given. Raises ConfigError for the first name that no job has: then nothing is done to the others,
    either.
    """
    return where.site().named(names)


def find_cluster_job(name: str, where: TargetOptions) -> ClusterJob:
    """Return the job, for a verb that only Kubernetes has. Raises ConfigError as `find_job` does."""
    from lockstep.cli.shared.kubesite import KubeSite

    return KubeSite(where.target()).job(name)


def running_pod(cluster_job: ClusterJob, node: int) -> str:
    """Return the name of a node's pod. Raises ConfigError for a node that the job doesn't have, Failed when its pod doesn't run."""
    from lockstep.api.objects import is_running
    from lockstep.kube.cluster import NOT_FOUND, ApiError
    from lockstep.kube.kinds import path_of
    from lockstep.plan.pages.logs import no_such_node

    client, name = cluster_job.target.client, pod_name(cluster_job.name, node)
    nodes = _nodes(cluster_job)
    if node >= nodes > 0:
        raise no_such_node(cluster_job.name, node, nodes)
    try:
        pod = client.request("GET", path_of("Pod", cluster_job.namespace, name))
    except ApiError as error:
        if error.status != NOT_FOUND:
            raise
        raise Failed(_no_pod(cluster_job, name)) from None
    if not is_running(pod) or "deletionTimestamp" in pod["metadata"]:
        state = "ends" if "deletionTimestamp" in pod["metadata"] else f"is {pod['status'].get('phase', 'unknown')} and doesn't run yet"
        raise Failed(f"pod {name} {state}: lockstep why {cluster_job.at}")
    return name


def _no_pod(cluster_job: ClusterJob, pod: str) -> str:
    from lockstep.api.objects import has_ended

    place = cluster_job.at
    if has_ended(cluster_job.job.get("status", {})):
        return f"job {cluster_job.name} has ended and pod {pod} is gone: lockstep logs {place} and lockstep cp read what it has left"
    return f"pod {pod} is not there: lockstep why {place}"


def _nodes(cluster_job: ClusterJob) -> int:
    """Number of nodes; 0: not known yet."""
    stated = cluster_job.job["spec"].get("nodes")
    if stated:
        return int(stated)
    from lockstep.cli.shared.target import load

    return load(cluster_job.target.cluster).profile.spec.gpus.default_nodes
