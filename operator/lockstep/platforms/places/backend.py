"""Interface of a place where jobs run. A place inherits both classes; mypy refuses one that lacks a method without a body here."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from lockstep.api.objects import Object
from lockstep.platforms.places.values import KnownJob, KnownPlace, NamedPlace, Say, Spot, Stale, Use, Volume, Volumes

if TYPE_CHECKING:
    from lockstep.api.cluster import TrainingCluster
    from lockstep.plan.pages.logs import LogSelection
    from lockstep.plan.pages.stacks import RankAnswer
    from lockstep.plan.pages.why import Answer
    from lockstep.platforms.files.copies import Copy, CopyWish
    from lockstep.platforms.files.sending import Sending
    from lockstep.platforms.jobs.looks import Looks
    from lockstep.platforms.jobs.shortresults import ShortRuns
    from lockstep.platforms.places.orders import Order
    from lockstep_gang.contract.layout import RankLayout


class Backend(KnownPlace, Protocol):
    """A place where jobs run."""

    @classmethod
    def at(cls, where: NamedPlace) -> Self:
        """Return the place that a command line names."""

    def ready(self, order: Order) -> None:
        """Do what must come before anything is said or read. Raises ConfigError for a job that can't run here."""
        return

    def run(self, order: Order) -> int:
        """Start the job, and stay with it to its end. Return the exit code: 0 complete, 1 failed, 130 interrupted. Ctrl-C ends the output;
        where the job is this process's own, it saves and stops. Raises ConfigError for a job that can't run here as written, or whose name
        another has that runs or has ended, and nothing was changed then; Failed where it isn't started, or doesn't get to run.
        """

    def short_runs(self, profile: TrainingCluster, seconds: int | None) -> ShortRuns:
        """Return what makes short runs here. `seconds`: limit of each that a person stated. Raises ConfigError where there are none."""

    def looks(self, job: str | None, interval: float, *, live: bool) -> Looks:
        """Look at a job every `interval` seconds; without one, at all that is here. `live`: lines replace those before. Raises as `job`."""

    async def copy(self, copy: Copy, wish: CopyWish) -> bool:
        """Copy between this machine and a job's volumes. Return True if everything arrived."""
        raise self.lack("cp")

    async def sync(self, sending: Sending) -> bool:
        """Send a folder to all nodes of a job. Return True if each has everything; return never if changes are watched."""
        raise self.lack("cp")

    def volumes_to_fill(self, name: str, order: Order | None, say: Say) -> Volumes:
        """Return the volumes that a job has, or will have by its order. Raises ConfigError where they can't be filled before it starts."""
        job = self.job(name)
        return {f"node {node}": job.volume(node, say, Use.FILL) for node in job.nodes_with_volumes()}

    def jobs(self, *, everywhere: bool = False, selector: str | None = None) -> list[Job]:
        """Return every job here. `everywhere`: of every namespace. `selector`: only those with these labels."""

    def job(self, name: str) -> Job:
        """Return the job of this name. Raises ConfigError, naming the jobs that are here, when there is none."""

    def current(self, jobs: Sequence[Job]) -> tuple[list[Object], Stale | None]:
        """Return the jobs as objects, those marked whose status nobody keeps up to date, and why nobody does."""
        return [job.job for job in jobs], None


class Job(KnownJob, Protocol):
    """A job, wherever it is."""

    backend: Backend

    def layout(self) -> RankLayout:
        """Return which node has which ranks; no rank while nobody knows."""

    def stacks(self, rank: int | None) -> list[RankAnswer]:
        """Ask one rank, or all of them, where it is. Return a reason in place of the stacks of a rank that can't answer."""

    def look_again(self, before: Object | None = None) -> Object:
        """Read its status again, and return it; with a longer look where its end may have come since the status `before`, if one is given.
        Raises JobGone if the job was deleted, also where another one has its name since.
        """

    def answer(self, bundle: Path | None) -> Answer:
        """Explain how it does, and write logs, stacks and objects to the file `bundle` if there is one."""

    def suspend(self, *, now: bool = False) -> bool:
        """Ask it to save and stop, and return at once. Return False if it was asked already. `now`: without a save."""

    def resume(self) -> bool:
        """Let it go on. Return False if it isn't stopped."""

    def raise_retry(self) -> int:
        """Start a failed job again. Return the number of this retry."""

    def delete(self) -> str:
        """Delete it, after a save if it runs. Return a sentence about what stays. Raises Failed."""

    def lines(self, selection: LogSelection, say: Say, *, follow: bool = False) -> AsyncGenerator[str, None]:
        """Yield the lines of its log that exist now, or that come until the job has ended. `say` hears what else a person should know."""

    def volume(self, node: int, say: Say, use: Use = Use.READ, gpus: int = 0) -> AbstractAsyncContextManager[Volume]:
        """Open the files of a node. `gpus`: free ones that a model gets there; 0: it gets CPUs. Raises Failed if they can't be reached."""

    def nodes_with_volumes(self) -> list[int]:
        """Return the nodes that have files of their own."""
        return [0]

    async def commits(self, verb: str, options: Sequence[str], say: Say) -> tuple[str, int]:
        """Return the answer of the trainer's `inspect` about its commits, and the exit code: 0, or 1 for bad news. Raises Failed."""

    def spot(self, node: int, *, ports: bool) -> AbstractAsyncContextManager[Spot]:
        """Open a node for a person's programs. `ports`: its ports are meant, too. Raises ConfigError where there is none, or Failed."""
        raise self.backend.lack("shell", **self.words)
