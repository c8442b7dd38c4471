"""Places of `lockstep get --everywhere`: every cluster that has a file, of Kubernetes and of hosts, and this machine. All are asked at
once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from lockstep.api.errors import Failed, LockstepError
from lockstep.api.files import clusterfile  # noqa: F401 (here, so that not all threads import it at once)
from lockstep.api.names import ANNOTATION_PLACE
from lockstep.api.objects import Object
from lockstep.cli.shared.clusterfiles import cluster_names, is_path, is_workspace, load_cluster, path_of
from lockstep.cli.shared.embedded import reachable_layout
from lockstep.cli.shared.folders import remembered, server_of
from lockstep.cli.shared.jobargs import TargetOptions
from lockstep.cli.shared.places import Verb
from lockstep.cli.shared.target import EMBEDDED, cluster_at, current_server, embedded_kubeconfig, own_target
from lockstep.cli.shared.terminal import with_advice
from lockstep.kube.threads import begin
from lockstep.platforms.clusters.target import Target
from lockstep.platforms.places.backend import Backend
from lockstep.platforms.places.backends import DEFAULT_WORKSPACE

LIMIT_SECONDS = 30.0
"""Seconds for all answers of a place: a host that is off is known to be only after 25, and its jobs are then shown as they were seen last.
"""


class SeenPlace(NamedTuple):
    """Jobs of a place, which is the word that --cluster takes, or `this machine`; and the reason why some are missing, or may be old."""

    place: str
    problem: str = ""
    jobs: Mapping[tuple[str, str, str], Object] = MappingProxyType({})
    """Each by a key that tells it from all others, whichever file has led to it."""
    backend: Backend | None = None


def look_everywhere(verb: Verb) -> list[SeenPlace]:
    """Return what is seen of each place, and each job once."""
    begun, seen, keys = time.monotonic(), list[SeenPlace](), set[tuple[str, str, str]]()
    asked = [(place, begin(partial(_ask, verb, place))) for place in _places()]  # (the verb must end though a place hangs)
    for place, answer in asked:
        try:
            one = answer.result(max(0.0, begun + LIMIT_SECONDS - time.monotonic()))
        except (LockstepError, OSError) as error:
            sentence = with_advice(error) if isinstance(error, Failed) else "; ".join(map(str, error.args))
            one = SeenPlace(place, sentence if answer.done() else f"it doesn't answer within {LIMIT_SECONDS:.0f} s")
        seen.append(one._replace(jobs={key: job for key, job in one.jobs.items() if key not in keys}))
        keys |= one.jobs.keys()
    return seen


def unasked(verb: Verb) -> str | None:
    """Return the API server of the kubeconfig if no cluster file is about it."""
    server, layout = current_server(verb.connections), reachable_layout()
    if server is None or cluster_at(server, "") or server in map(server_of, cluster_names()):
        return None
    return None if layout is not None and server == layout.server else server


def _places() -> list[str]:
    """Return the clusters that have a file, the one in use if it is a path, and workspaces of this machine. An embedded cluster that was
    never up isn't one.
    """
    choice, names = next(iter(remembered()), None), cluster_names()
    used = "" if choice is None else choice.cluster
    if not (path_of(EMBEDDED).is_file() or used == EMBEDDED or embedded_kubeconfig() or server_of(EMBEDDED)):
        names.remove(EMBEDDED)
    paths = {path.resolve() for path in (DEFAULT_WORKSPACE, *map(path_of, names))}
    return [*names, *([used] if is_path(used) and Path(used).resolve() not in paths else []), str(DEFAULT_WORKSPACE)]


class _Own(TargetOptions):
    """A cluster that is asked at its own API server, whichever context is the current one."""

    def target(self) -> Target:
        assert self.file is not None  # noqa: S101 (it is given)
        return own_target(self.verb, self.file, self.named)


def _ask(verb: Verb, place: str) -> SeenPlace:
    """Look at a place. Raises LockstepError, OSError, and Failed for whatever else went wrong."""
    try:
        if is_workspace(place):
            where, place = TargetOptions(place, verb=verb), "this machine"
        else:
            where = _Own(place, verb=verb, file=load_cluster(place))
        backend = where.backend(hurried=True)
        jobs = backend.jobs()
        current, stale = backend.current(jobs)
        keys = [(job.uid, job.name, job.backend.words.where) for job in jobs]  # (a run on this machine has no uid of its own)
        marked = {key: _marked(job, place) for key, job in zip(keys, current, strict=True)}
        return SeenPlace(place, "" if stale is None else stale.text, marked, backend)
    except (LockstepError, OSError):
        raise
    except Exception as error:
        raise Failed(f"its answer isn't understood: {error!r}") from error


def _marked(job: Object, place: str) -> Object:
    annotations = {**(job["metadata"].get("annotations") or {}), ANNOTATION_PLACE: place}
    return {**job, "metadata": {**job["metadata"], "annotations": annotations}}
