"""The place where a short run is made, as options and the cluster file say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.cli.shared.signals import exiting_on_ctrl_c
from lockstep.cli.shared.terminal import waiting
from lockstep.platforms.output import tell

if TYPE_CHECKING:
    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.cli.shared.jobargs import TargetOptions
    from lockstep.platforms.jobs.shortresults import ShortRuns

T = TypeVar("T")


def short_runs(file: ClusterFile, named: str | None, where: TargetOptions, namespace: str, timeout: int | None) -> ShortRuns:
    """Return where short runs are made. `named`: the cluster as it was typed; `namespace`: of the pods. Raises ConfigError for options
    that mean nothing there.
    """
    if where.local:
        from lockstep.platforms.local.run import LocalRuns

        return LocalRuns(file.profile, where.workspace)
    if file.hosts is not None:
        from lockstep.platforms.hosts.backend import fleet_of
        from lockstep.platforms.hosts.shortruns import HostRuns

        fleet = fleet_of(file, named, namespace=where.namespace, context=where.context)
        return HostRuns(fleet, file.profile, tell, timeout)
    from lockstep.platforms.kubernetes.alone import TimeLimit
    from lockstep.platforms.kubernetes.shortruns import PodRuns

    return PodRuns(where.connections, file.profile, namespace, tell, TimeLimit.of(timeout))


def result_of(runs: ShortRuns, make: Callable[[ShortRuns], Coroutine[Any, Any, T]], what: str = "") -> T:
    """Return the result of a short run; say that `what` goes on, if the run is silent; on Ctrl-C, say what is left, and exit with 130."""
    with exiting_on_ctrl_c(f"lockstep: interrupted; {runs.left}"), waiting(what) if what and runs.silent else nullcontext():
        return asyncio.run(make(runs))
