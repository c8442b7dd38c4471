"""Inputs of verbs about a job: the job file, the cluster file, and both resolved."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.api.errors import ConfigError
from lockstep.api.names import ANNOTATION_TYPED, FRESH
from lockstep.cli.shared.clusterfiles import cluster_names, is_workspace, load_cluster, read_text
from lockstep.cli.shared.places import Verb, VerbCommand
from lockstep.cli.shared.target import aim_at_file, refuse_workspace
from lockstep.platforms.output import tell
from lockstep.platforms.places.backends import backend_class

if TYPE_CHECKING:
    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.api.job import TrainingJob
    from lockstep.cli.shared.jobargs import TargetOptions
    from lockstep.plan.render.resolved import Resolved

FilesOption = Annotated[
    list[Path],
    typer.Option(
        "-f", "--file", metavar="FILE", show_default=False,
        help="A job file or a folder of them; - reads standard input. You may repeat -f, or leave it out before the file.",
    ),
]  # fmt: skip
FileOption = Annotated[
    list[Path],
    typer.Option(
        "-f", "--file", metavar="FILE", show_default=False, help="The job file; - reads standard input. You may leave out -f itself."
    ),
]
OptionalFileOption = Annotated[
    list[Path] | None, typer.Option("-f", "--file", metavar="FILE", show_default=False, help="The job file; - reads standard input.")
]
FILE_ENDINGS = (".yaml", ".yml", ".json")


class TakesFiles(VerbCommand):
    """A verb whose words without an option are job files, as if -f stood before each: what a shell makes of *.yaml."""

    def make_parser(self, ctx: Any) -> Any:
        parser = super().make_parser(ctx)
        parse = parser.parse_args

        def with_files(args: list[str]) -> Any:
            options, words, order = parse(args)
            if words:
                options["file"] = [*options.get("file", []), *words]
            return options, [], order

        parser.parse_args = with_files  # type: ignore[method-assign]
        return parser

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[FILE]..."]


StandIn = Callable[["TrainingJob"], "ClusterFile"]
"""Function that returns the cluster file which stands in for a job's."""
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override a field of the job: training.lora.rank=8, nodes=1. May be repeated."),
]


@dataclass(frozen=True)
class Inputs:
    """A job and the cluster that it is for, as their files say."""

    job: TrainingJob
    cluster: ClusterFile
    namespace: str
    source: str = ""
    """The job's file, and its name where that file holds several."""

    def at(self, where: TargetOptions) -> TargetOptions:
        """Return the place of the job, as its file and these options say."""
        choice = where.verb.choice  # (as it is remembered where that is why it counts, else by its name)
        place = where.on(self.cluster, where.cluster or (self.cluster.cluster.name if choice is None else choice.cluster))
        return replace(place, namespace=where.namespace or self.job.metadata.namespace)

    def typed(self, verb: str, options: Mapping[str, object], words: Sequence[str] = ()) -> Inputs:
        """Return the same, with the command that starts its job again, for places without an API server. `options`: values by their names;
        unset ones are left out.
        """
        text = shlex.join(["lockstep", verb, *option_words(options), *(("--", *words) if words else ())])
        metadata = self.job.metadata
        annotations = {**metadata.annotations, ANNOTATION_TYPED: text}
        return replace(self, job=self.job.model_copy(update={"metadata": metadata.model_copy(update={"annotations": annotations})}))


def option_words(options: Mapping[str, object]) -> Iterator[str]:
    """Yield the words of options as they were typed: unset ones, --fresh and values of variables, which may be secrets, are left out."""
    for name, value in options.items():
        for one in value if isinstance(value, (list, tuple)) else [value] if value else []:
            word, is_env = str(one), name == "--set" and str(one).removeprefix("spec.").startswith("env")
            word = f"{word.partition('=')[0]}=..." if is_env else "FILE" if word == "-" else word
            if word != FRESH:
                yield from [name] if one is True else [name, word]


def only(files: Path | Sequence[Path] | None, verb: str) -> Path:
    """Return the one file of a verb that takes one job. Raises ConfigError for several, and for a folder."""
    named = [files] if isinstance(files, Path) else list(files or ())
    if len(named) > 1:
        raise ConfigError(
            f"lockstep {verb} takes one job file, and {len(named)} were given ({', '.join(map(str, named))}): run it once for each"
        )
    if named[0].is_dir():
        raise ConfigError(f"lockstep {verb} takes one job file, and {named[0]} is a folder: name one of its files")
    return named[0]


def read_all(
    files: Path | Sequence[Path],
    where: TargetOptions,
    changes: Sequence[str] | None = None,
    *,
    unnamed: Callable[[], str] | None = None,
    place: StandIn | None = None,
    instead: StandIn | None = None,
) -> list[Inputs]:
    """Return every job of all files, in their order; of a folder its .yaml, .yml and .json files, sorted, without those that hold no job.

    `unnamed`: which cluster is meant where neither `where` nor the job names one; without it the one in use, but with a context none.
    `instead`: what stands in where none is in use; without it that is an error. `place`: what stands in for any cluster.

    Raises ConfigError with every mistake of all of them.
    """
    from lockstep.api.files.jobfile import NoJob

    inputs: list[Inputs] = []
    mistakes: list[str] = []
    for file, in_folder in _expanded([files] if isinstance(files, Path) else files):
        try:
            inputs += _read_jobs(file, where, changes, place, unnamed or partial(_in_use, file, where, instead))
        except NoJob as error:
            if in_folder:
                tell(f"note: {file} holds no TrainingJob and is skipped")
            else:
                mistakes += map(str, error.args)
        except ConfigError as error:
            mistakes += map(str, error.args)
    if mistakes:
        raise ConfigError(*mistakes)
    if not inputs:
        raise ConfigError(
            f"{', '.join(map(str, [files] if isinstance(files, Path) else files))}: there is no job file (.yaml, .yml, .json)"
        )
    return inputs


def _expanded(files: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    """(file, whether only its folder was named)."""
    for file in files:
        if file.is_dir():
            yield from ((path, True) for path in sorted(file.iterdir()) if path.suffix in FILE_ENDINGS)
        else:
            yield file, False


def _read_jobs(
    file: Path, where: TargetOptions, changes: Sequence[str] | None, place: StandIn | None, unnamed: Callable[[], str | StandIn]
) -> list[Inputs]:
    from lockstep.api.files.jobfile import job_nodes, read_job

    jobs = [read_job(node, str(file), changes or ()) for node in job_nodes(read_text(file), str(file))]
    named = [place or where.cluster or job.spec.cluster for job in jobs]
    default = "" if all(named) else unnamed()
    return [
        _inputs(job, file, name or default, where, f"{file}: {job.metadata.name}" if len(jobs) > 1 else str(file))
        for job, name in zip(jobs, named, strict=True)
    ]


def read_inputs(
    file: Path, where: TargetOptions, changes: Sequence[str] | None = None, *, unnamed: Callable[[], str] | None = None
) -> Inputs:
    """Return the job and its cluster. `unnamed`: as in `read_all`.

    Raises ConfigError with every mistake of the job file, of `changes` (--set), or of the cluster file, or when they name no cluster.
    """
    from lockstep.api.files.jobfile import parse_job_file

    job = parse_job_file(read_text(file), str(file), changes or ())
    named = where.cluster or job.spec.cluster or (unnamed() if unnamed is not None else _in_use(file, where))
    return _inputs(job, file, named, where, str(file))


def _inputs(job: TrainingJob, file: Path, cluster: str | StandIn, where: TargetOptions, source: str) -> Inputs:
    cluster_file = _read_cluster(job, file, cluster, where.verb) if isinstance(cluster, str) else cluster(job)
    stated, namespace = job.metadata.namespace, where.namespace
    if namespace and stated and namespace != stated:
        raise ConfigError(f"{file}: metadata.namespace is {stated}, but --namespace is {namespace}: remove one of them")
    return Inputs(job, cluster_file, namespace or stated or cluster_file.cluster.namespace, source)


def _read_cluster(job: TrainingJob, file: Path, name: str, verb: Verb) -> ClusterFile:
    stated = job.spec.cluster
    try:
        cluster_file = load_cluster(name)
    except ConfigError as error:
        if name == stated and str(error).startswith("there is no cluster"):
            raise ConfigError(f"{file}: spec.cluster: {error}") from error
        raise
    aim_at_file(verb, cluster_file, name)
    used = cluster_file.cluster.name
    if stated is not None and stated != used and backend_class(cluster_file.kind).has_operator:
        from lockstep.platforms.jobs.resolved import warn

        warn("OtherCluster", f"{file} names the cluster {stated}, and {used} is used here: an operator takes {stated}")
    return cluster_file


def _in_use(file: Path, where: TargetOptions, instead: StandIn | None = None) -> str | StandIn:
    """Return the cluster that counts where neither the job nor --cluster names one, and say so once a verb.

    Raises ConfigError where a context was typed, or none is in use and nothing stands in.
    """
    verb, context, choice = where.verb, where.context, where.chosen()
    if context is None and instead is not None and (choice is None or is_workspace(choice.cluster)):
        tell(f"note: {file} names no cluster, and none is in use: it is checked without one (--cluster names one)")
        return instead
    if choice is not None:
        refuse_workspace(choice.cluster)
    if choice is None:
        why = "none is in use (lockstep use)" if context is None else "--context names no cluster file"
        raise ConfigError(f"{file}: spec.cluster is not set, and {why}: set it or use --cluster; there is {', '.join(cluster_names())}")
    if choice.cluster != verb.told:
        tell(f"note: {file} names no cluster: this is about {choice.cluster}, which {choice.by} names (--cluster names another)")
        verb.told = choice.cluster
    return choice.cluster


def resolve_inputs(inputs: Inputs, *, quiet: bool = False) -> Resolved:
    """Return the resolved job; its warnings go to stderr, unless `quiet`. Raises Refused (a ConfigError) with every reason against it."""
    from lockstep.platforms.jobs.resolved import resolve_with_warnings

    return resolve_with_warnings(inputs.job, inputs.cluster, inputs.namespace, quiet=quiet)
