"""Options of verbs about a job on a cluster: its name, where it is, and which of its pods. `find_job` turns them into a connection and the
job.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from lockstep.api.errors import ConfigError, LockstepError
from lockstep.api.names import DEV_ENVIRONMENT, HOSTS, JOB_NAME_PATTERN, KUBERNETES
from lockstep.cli.shared.clusterfiles import OwnFiles, Peeked, is_workspace, peek
from lockstep.cli.shared.folders import QUICKSTART, remembered, state_folder
from lockstep.cli.shared.places import PLACES, Verb
from lockstep.cli.shared.target import EMBEDDED, aim_at, in_use, is_embedded, load, refuse_workspace, tell_place
from lockstep.kube.aim import Connections, environment_kubeconfig
from lockstep.platforms.clusters.target import Target
from lockstep.platforms.places.backends import DEFAULT_WORKSPACE, backend_of
from lockstep.platforms.places.orders import IN_NAMESPACE, LOCAL, lack

if TYPE_CHECKING:
    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.plan.cluster.choice import Choice
    from lockstep.platforms.kubernetes.job import KubernetesJob
    from lockstep.platforms.places.backend import Backend, Job


def known_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return what a shell completes a job's name to; nothing where nothing can be asked: a shell that completes must not complain."""
    from lockstep.kube.jobs import list_jobs

    try:
        target = TargetOptions.of(context).target()
        names = [str(job["metadata"]["name"]) for job in list_jobs(target.client, target.namespace)]
    except (LockstepError, OSError):
        return []
    return sorted(name for name in names if name.startswith(incomplete))


def unless_said(context: typer.Context, parameter: typer.CallbackParam, value: str) -> str:
    """Return the cluster that is named, as an argument or by --cluster, else the one that counts where none is."""
    source, where = context.get_parameter_source(parameter.name or ""), TargetOptions.of(context)
    if source is None or source.name == "DEFAULT":
        return where.named
    if where.cluster:
        raise ConfigError(f"{value} and --cluster {where.cluster} both name a cluster: use one of them")
    return value


UNNAMED = "Default: the one in use (lockstep use), else local."
JobsArgument = Annotated[list[str], typer.Argument(help="The jobs' names.", show_default=False, autocompletion=known_names)]
JobArgument = Annotated[str, typer.Argument(help="The job's name.", show_default=False, autocompletion=known_names)]
OptionalClusterArgument = Annotated[
    str,
    typer.Argument(
        callback=unless_said,
        show_default=False,
        help=f"A cluster of clusters/, or a cluster file's path. {UNNAMED}",
    ),
]
OptionalJobArgument = Annotated[str, typer.Argument(help="The job's name.", metavar="[JOB]", autocompletion=known_names)]
NodeOption = Annotated[int, typer.Option("--node", min=0, help="The node, and so the pod. The first is 0, the default.")]
DEFAULT_JOB = DEV_ENVIRONMENT


@dataclass(frozen=True)
class TargetOptions:
    """Options that say where a verb acts: on a cluster with a namespace and a context of the kubeconfig, or on this machine."""

    cluster: str | None = None
    """Name of a cluster, path of its file, or folder of a workspace of this machine."""
    namespace: str | None = None
    context: str | None = None
    verb: Verb = field(default_factory=Verb, compare=False)
    """The verb that runs."""
    file: ClusterFile | None = field(default=None, compare=False)
    """The cluster file that counts, if it is read already."""

    @classmethod
    def of(cls, context: typer.Context) -> TargetOptions:
        """Return what is typed, before the verb and after it. Raises ConfigError for two places."""
        verb = Verb.of(context)
        typed = {**verb.places}
        if typed.pop("local", False) and typed.setdefault("cluster", str(DEFAULT_WORKSPACE)) != str(DEFAULT_WORKSPACE):
            raise ConfigError(f"--local is this machine, and --cluster {typed['cluster']} names another place: use one of them")
        return cls(**typed, verb=verb)

    def __post_init__(self) -> None:
        self.verb.connections.context = self.context

    @property
    def connections(self) -> Connections:
        """Return the way to the cluster that the verb is about."""
        return self.verb.connections

    def chosen(self) -> Choice | None:
        """Return the cluster that counts where no option names one, which the verb knows then; None with --context, and where nothing names
        one. Raises ConfigError for one that is gone.
        """
        self.verb.choice = in_use() if self.context is None else None
        return self.verb.choice

    @cached_property
    def named(self) -> str:
        """Return the cluster that is named, else the one that counts where none is: with --context none but the context's own words, else
        the one that `remembered` has first.

        Where nothing names one and the embedded cluster isn't up, ~/.kube/config is asked, as kubectl would. Raises as `chosen`.
        """
        if self.cluster:
            return self.cluster
        choice = self.chosen()
        self.verb.unnamed = EMBEDDED if choice is None else None
        return EMBEDDED if choice is None else choice.cluster

    @property
    def workspace(self) -> Path | None:
        """Return the workspace of this machine that is typed; None: it isn't one."""
        return Path(self.cluster) if self.cluster and is_workspace(self.cluster) else None

    def target(self) -> Target:
        """Return a connection to the cluster of the kubeconfig, and the namespace that is meant there."""
        from lockstep.kube.cluster import Client

        verb, cluster, namespace = self.verb, self.named, self.chosen_namespace()
        is_stand_in = cluster == verb.unnamed
        return Target(
            Client(verb.connections),
            namespace,
            cluster,
            self._words_to_it(),
            is_stand_in,
            not is_stand_in or is_embedded(verb, cluster),
            self.context,
            OwnFiles(),
        )

    def _words_to_it(self) -> str:
        """Return the options of `Target.options` for the cluster, as it was given."""
        usual = next(iter(remembered()), None)
        is_usual = self.verb.unnamed is not None or self.named == (EMBEDDED if usual is None else usual.cluster)
        words = [*(() if is_usual else ("--cluster", self.named)), *(("--context", self.context) if self.context else ())]
        return "".join(f" {shlex.quote(word)}" for word in words)

    @cached_property
    def cluster_file(self) -> ClusterFile:
        """Return the cluster file that is meant. Raises ConfigError for one that can't be read."""
        return self.file or load(self.verb, self.named)

    def of_hosts(self) -> tuple[ClusterFile, str]:
        self.refuse_kubernetes(self.named)
        return self.cluster_file, self.named

    def workspaces(self) -> Sequence[Path]:
        """Return the workspace; the usual one with that of `lockstep quickstart --local` behind it."""
        folder = Path(self.named)
        with suppress(ConfigError):
            return [folder, *([state_folder() / QUICKSTART] if folder == DEFAULT_WORKSPACE else [])]
        return [folder]

    @property
    def kind(self) -> str:
        """Return the backend's name in `places.backends`."""
        if is_workspace(self.named):
            if "namespace" in self.verb.places:
                raise lack(LOCAL, "-n", name=self.named)
            return LOCAL
        return KUBERNETES if self.file is None and self._is_of_kubernetes() else self.cluster_file.kind

    def _is_of_kubernetes(self) -> bool:
        """Return True if a look at the cluster's file shows that it is of Kubernetes, without the time that reading it takes.

        `local` is no hosts' unless an option names it: whichever folder one stands in may have a file of that name.
        """
        stated, verb = peek(self.named), self.verb
        is_typed = verb.unnamed is None and (verb.choice is None or verb.choice.is_typed)
        return (stated is not None and not stated.is_of_hosts) or (self.named == EMBEDDED and not is_typed)

    def backend(self, *, hurried: bool = False) -> Backend:
        """Return where jobs are: the hosts of a cluster file, a namespace, or a workspace of this machine."""
        backend = backend_of(self.kind, self)
        self.tell_of(backend)
        backend.hurried = hurried
        return backend

    def tell_of(self, backend: Backend) -> None:
        """Say where the verb acts. With namespaces, that is said when one is chosen."""
        if not backend.has_namespaces:
            tell_place(self.verb, backend.words.where)

    def on(self, file: ClusterFile, named: str) -> TargetOptions:
        """Return the place that a cluster file describes, which was given as `named`."""
        return replace(self, cluster=named, file=file)

    def refuse_kubernetes(self, hosts: str) -> None:
        """Raise ConfigError if options that only Kubernetes has are typed for a cluster of hosts."""
        if self.namespace or self.context:
            raise lack(HOSTS, "-n", name=hosts)

    def chosen_namespace(self) -> str:
        """Return the namespace that is meant on the cluster: the one asked for, else as kubectl chooses it the context's own. A named
        cluster's file says it for its cluster, and the models are imported only where that needs explaining.
        """
        verb, cluster = self.verb, self.named
        refuse_workspace(cluster)
        stated = peek(cluster)
        if stated is None:
            file = load(verb, cluster)
            stated = Peeked(file.cluster.name, file.cluster.namespace, file.cluster.api, file.hosts is not None)
        aim_at(verb, stated.name, stated.api, is_of_hosts=stated.is_of_hosts, named=cluster)
        if stated.is_of_hosts:
            return HOSTS
        chosen, name = self.namespace, stated.name
        if not (is_embedded(verb, name) or chosen or name != EMBEDDED):
            from lockstep.kube.kubeconfig import chosen_context

            chosen = chosen_context(environment_kubeconfig().paths, self.context)[1]
        chosen = chosen or stated.namespace
        tell_place(verb, f"on {self._cluster_words(name)}, namespace {chosen}")
        return chosen

    def _cluster_words(self, name: str) -> str:
        """Return the cluster in a sentence; its API server stands in for a name where nothing names it."""
        from lockstep.kube.cluster import Client

        is_nameless = name == self.verb.unnamed and not is_embedded(self.verb, name)
        return f"the cluster at {Client(self.connections).server}" if is_nameless else f"cluster {name}"


def stated_place(where: TargetOptions, *, in_namespace: bool) -> str | None:
    """Return the place that options name, without a look at a cluster file; None: that says it. Raises ConfigError for two."""
    stated = [place for place, is_stated in ((LOCAL, where.workspace and where.kind), (IN_NAMESPACE, in_namespace)) if is_stated]
    if len(stated) > 1:
        raise ConfigError("a job runs either on this machine (--local) or in a namespace (--in-namespace): use one of them")
    return stated[0] if stated else None


def acts_on(*options: str, here: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a verb take these options of the root command. It gets all of them as its first argument. `here`: --cluster may be a workspace
    of this machine.
    """

    def decorate(verb: Callable[..., Any]) -> Callable[..., Any]:
        own = signature(verb, eval_str=True)

        @wraps(verb)
        def with_options(context: typer.Context | TargetOptions, *arguments: Any, **values: Any) -> Any:
            where = context if isinstance(context, TargetOptions) else TargetOptions.of(context)
            if where.workspace and not here:
                refuse_workspace(str(where.cluster))
            return verb(where, *arguments, **values)

        context = Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        new = own.replace(parameters=[context, *list(own.parameters.values())[1:]])
        vars(with_options).update(__signature__=new, takes=options)
        return with_options

    return decorate


on_cluster = acts_on("cluster", "namespace", "context")
on_site = acts_on(*PLACES, here=True)


def limit_option(what: str) -> Any:
    """Return the option that limits a short run of pods."""
    return typer.Option("--timeout", min=1, help=f"{what} Default: 900, without waiting for nodes that the cluster doesn't have.")


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


def find_job(name: str, where: TargetOptions) -> Job:
    """Return the job, wherever it is. Raises ConfigError, naming the jobs that are there, when there is none of this name."""
    return where.backend().job(name)


def job_among(sources: Sequence[str]) -> str | None:
    """Return the job that is named in place of folders of this machine; None: all are folders. Raises ConfigError for both at once."""
    jobs = [source for source in sources if re.fullmatch(JOB_NAME_PATTERN, source) and not Path(source).exists()]
    if jobs and len(sources) > 1:
        raise ConfigError(f"{jobs[0]} is not a folder of this machine: name one job, or only folders (./{jobs[0]} is a folder)")
    return jobs[0] if jobs else None


def find_jobs(names: Sequence[str], backend: Backend) -> list[Job]:
    """Return each job once, in the order given. Raises ConfigError for the first name that no job has: then nothing is done to the others,
    either.
    """
    return [backend.job(name) for name in dict.fromkeys(names)]


def find_cluster_job(name: str, where: TargetOptions) -> KubernetesJob:
    """Return the job, for a verb that only Kubernetes has. Raises ConfigError as `find_job` does."""
    return cast("KubernetesJob", backend_of(KUBERNETES, where).job(name))
