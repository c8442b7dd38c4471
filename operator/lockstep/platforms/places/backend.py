"""A place where jobs run: a namespace of a cluster, hosts over ssh, a workspace of this machine. A verb about a job asks a `Backend`, and
works on each alike.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import DATASETS, WORKSPACE
from lockstep.api.objects import Object, has_ended, is_true, typed_command
from lockstep.kube.threads import in_thread
from lockstep.plan.pages.logs import LogSelection, request_of
from lockstep.platforms.output import put, say
from lockstep.platforms.places.orders import ELSEWHERE, LACKS, Order, PlanWishes, lack
from lockstep_spec.exits import FAILED

if TYPE_CHECKING:
    from lockstep.api.cluster import TrainingCluster
    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.api.hosts import Host
    from lockstep.plan.ahead.forecast import Forecast
    from lockstep.plan.cluster.finding import Finding
    from lockstep.plan.pages.stacks import RankAnswer
    from lockstep.plan.pages.why import Answer
    from lockstep.plan.render.resolved import Resolved
    from lockstep.plan.translate.trainer import Size
    from lockstep.platforms.clusters.target import Target
    from lockstep.platforms.files.copies import Copy, CopyWish
    from lockstep.platforms.files.sending import Sending
    from lockstep.platforms.jobs.looks import Looks
    from lockstep.platforms.jobs.shortresults import ShortRuns
    from lockstep.programs import Place

POLL_SECONDS = 0.5
"""Between two looks at what is waited for."""


STOP_SECONDS = 600.0
"""Longest time for which a job that saves and stops is waited for."""


class JobGone(Failed):
    """A job that was watched was deleted."""

    def __init__(self, name: str, another: object = None) -> None:
        """`another`: what has its name since."""
        super().__init__(f"job {name} was deleted{' and created again' if another else ''}")


class Stale(NamedTuple):
    """Reason why what is shown of jobs may be old."""

    since: str
    """RFC 3339; '' where nobody knows."""
    text: str


class Volume(NamedTuple):
    """A node's files: where a program can read them, and the folders there that stand for /workspace and /datasets."""

    place: Place
    workspace: str
    datasets: str

    def run_folder(self, job: str) -> str:
        """Return the job's folder there."""
        return f"{self.workspace}/runs/{job}"

    def path(self, path: str) -> str:
        """Return a job's path as it is there: what is below /workspace or /datasets is in the folder that stands for it."""
        for of_job, folder in ((WORKSPACE, self.workspace), (DATASETS, self.datasets)):
            if path == of_job or path.startswith(f"{of_job}/"):
                return folder + path.removeprefix(of_job)
        return path


class Spot(NamedTuple):
    """A node where programs run beside the ranks, and the way to its ports."""

    name: str
    """Name of its pod or host."""
    volume: Volume
    """Its files, and where programs run."""
    forwarded: Callable[[int, int], AbstractAsyncContextManager[int]]
    """Forward a port there to one of this machine: to the second number, or another one where that is taken."""
    desktop: Callable[[str], Awaitable[str]]
    """Command that opens a folder there in the VS Code of this machine; "" where none is known."""
    host: Host | None
    """Host of the cluster file; None: it is a pod."""
    until_gone: Callable[[], Awaitable[object]]
    """Wait until nothing there can be reached any more, and raise Failed. A host stays."""


def instead_of(name: str, names: Iterable[str], have: str, elsewhere: str) -> str:
    """Return the jobs that are there in place of one that isn't, and a hint. `have` and `elsewhere` are as those of a Backend."""
    from lockstep.api.files.problems import nearest

    every = sorted(names)
    close = nearest(name, every)
    hint = f"; did you mean {close}?" if close else elsewhere and f"; {elsewhere}"
    return f"{have} {', '.join(every) or 'none'}{hint}"


Say = Callable[[str], None]
Volumes = Mapping[str, AbstractAsyncContextManager[Volume]]
"""Name of each node that has files of its own → these, which are opened by entering it."""


class NamedPlace(Protocol):
    """A place as a command line names it. A backend asks for what it needs."""

    def target(self) -> Target:
        """Return the API server and the namespace that are meant."""

    def of_hosts(self) -> tuple[ClusterFile, str]:
        """Return the cluster file of hosts, and the cluster as it was given."""

    def workspaces(self) -> Sequence[Path]:
        """Return the workspace of this machine that is meant, and those that are looked into beside it."""


class Backend(ABC):
    """A place where jobs run."""

    kind: str
    """Its name in `backends`."""
    has_operator = False
    """True if an operator keeps the jobs here: their status, and what happens to them while nobody looks."""
    has_namespaces = False
    """True if jobs here are in namespaces."""
    is_one_machine = False
    """True if all nodes of a job share the processors and the memory of one machine."""
    keeps_command = False
    """True if a job keeps the command that started it, to say how it starts again."""

    again: str
    """Words that lead here again on a command line, after a job's name: `-n team`, `--cluster lab`, `--local`."""
    anew: str
    """Command that trains a job again from step 0."""
    where: str
    """Place in messages: `in namespace team`, `on the hosts of lab`."""
    noun = "job"
    """Name of a job's kind in messages."""
    have = "it has"
    """Words before the jobs that are here."""
    hurried = False
    """True: only a moment is waited for a part of this place that doesn't answer though others have, and what is shown says so."""
    elsewhere = ""
    """Option that names another such place, for a job that isn't here; '' where none does."""

    @classmethod
    @abstractmethod
    def at(cls, where: NamedPlace) -> Self:
        """Return the place that a command line names."""

    def ready(self, order: Order) -> None:  # noqa: B027 (most have nothing to do)
        """Do what must come before anything is said or read. Raises ConfigError for a job that can't run here."""

    @classmethod
    def doubts(cls, resolved: Resolved) -> list[str]:
        """Return what may be wrong with a job here, as far as its files say. Raises ConfigError for what is wrong."""
        return []

    @classmethod
    def plan(cls, where: NamedPlace, order: Order, resolved: Resolved, wishes: PlanWishes) -> tuple[list[Finding], Forecast]:
        """Say what would become of the job in a place, and change nothing there. Raises ConfigError for what was stated and can't be used,
        and where the place can't be asked.
        """
        raise lack(cls.kind, "plan")

    @classmethod
    def size(cls, file: ClusterFile, named: str, nodes: int | None, gpus: int | None) -> tuple[Size, Iterable[str]]:
        """Return the size of a job whose file is to state so many nodes and GPUs of each, on a cluster that was given as `named`; and why
        its number of ranks isn't known.
        """
        from lockstep.plan.translate.trainer import Size

        own = file.profile.spec.gpus
        count, each = nodes or own.default_nodes, own.per_node if gpus is None else gpus
        is_stated = nodes is not None or gpus is not None
        return Size(count * max(each, 1), count if is_stated else None, each if is_stated else None), ()

    @property
    def place(self) -> str:
        """Return the place as a verb that changes something there says it."""
        return self.where

    @abstractmethod
    def run(self, order: Order) -> int:
        """Start the job, and stay with it to its end. Return the exit code: 0 complete, 1 failed, 130 interrupted.

        Ctrl-C ends the output; where the job is this process's own, it saves and stops.

        Raises:
            ConfigError: the job can't run here as written, or one of its name has ended or runs; then nothing was changed.
            Failed: it could not be started, or doesn't get to run.
        """

    @abstractmethod
    def short_runs(self, profile: TrainingCluster, seconds: int | None) -> ShortRuns:
        """Return what makes short runs here. `seconds`: limit of each that a person stated. Raises ConfigError where there are none."""

    @abstractmethod
    def looks(self, job: str | None, interval: float, *, live: bool) -> Looks:
        """Look at a job every `interval` seconds; without one, at all that is here. `live`: lines replace those before. Raises as `job`."""

    async def copy(self, copy: Copy, wish: CopyWish) -> bool:
        """Copy between this machine and a job's volumes. Return True if everything arrived."""
        raise self.lack("cp")

    async def sync(self, sending: Sending) -> bool:
        """Send a folder to all nodes of a job. Return True if each has everything; return never if changes are watched."""
        raise self.lack("cp")

    def lack(self, what: str, **words: object) -> ConfigError:
        """Return the error about what this place hasn't got, by `LACKS`. `words`: `Job.words`."""
        return lack(self.kind, what, **vars(self), **words)

    def refuse(self, what: str, stated: object = True, **words: object) -> None:
        """Raise ConfigError for what is stated and this place hasn't got."""
        row = LACKS.get(what, {})
        if stated and (self.kind in row or (ELSEWHERE in row and not self.has_operator)):
            raise self.lack(what, **words)

    async def volumes_to_fill(self, order: Order, say: Say) -> Volumes:
        """Return the volumes that a job has or will have, to be filled before it starts. Raises ConfigError where they can't be."""
        return await self.job(order.job.metadata.name).volumes_to_fill(say)

    @abstractmethod
    def jobs(self, *, everywhere: bool = False, selector: str | None = None) -> list[Job]:
        """Return every job here. `everywhere`: of every namespace. `selector`: only those with these labels."""

    @abstractmethod
    def job(self, name: str) -> Job:
        """Return the job of this name. Raises ConfigError, naming the jobs that are here, when there is none."""

    def no_such_job(self, name: str, names: Iterable[str]) -> str:
        """Explain a job that isn't here, where these are."""
        return f"there is no {self.noun} {name} {self.where}: {instead_of(name, names, self.have, self.elsewhere)}"

    def default_nodes(self, job: Object) -> int | None:
        """Return the number of nodes of a job that states none; None where nobody knows."""
        return (job.get("status") or {}).get("nodes") or None

    def current(self, jobs: Sequence[Job]) -> tuple[list[Object], Stale | None]:
        """Return the jobs as objects, those marked whose status nobody keeps up to date, and why nobody does."""
        return [job.job for job in jobs], None


class Job(ABC):
    """A job, wherever it is. `job` is a TrainingJob with its status, as an API server has it."""

    backend: Backend
    job: Object

    @property
    def name(self) -> str:
        return str(self.job["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.job["metadata"]["uid"])

    @property
    def status(self) -> Object:
        """Status as it was read; empty if it has none yet."""
        return self.job.get("status") or {}

    @property
    def at(self) -> str:
        """The job on a command line: `demo -n team`."""
        return f"{self.name} {self.backend.again}".rstrip()

    @abstractmethod
    def rank_node(self, rank: int) -> int:
        """Return the node that has a rank. Raises ConfigError for a rank that the job hasn't got."""

    @abstractmethod
    def stacks(self, rank: int | None) -> list[RankAnswer]:
        """Ask one rank, or all of them, where it is. Return a reason in place of the stacks of a rank that can't answer."""

    @abstractmethod
    def look_again(self) -> Object:
        """Read its status again, and return it. Raises JobGone if the job was deleted, also where another one has its name since."""

    def look_for_end(self, before: Object) -> Object:
        """Return its status as `look_again` does, after a longer look where its end may have come since the status `before`."""
        return self.look_again()

    def events(self) -> list[Object]:
        """Return its events, the oldest first; [] where nothing keeps events."""
        return []

    @abstractmethod
    def answer(self, bundle: Path | None) -> Answer:
        """Explain how it does, and write logs, stacks and objects to the file `bundle` if there is one."""

    @abstractmethod
    def suspend(self, *, now: bool = False) -> bool:
        """Ask it to save and stop, and return at once. Return False if it was asked already. `now`: without a save."""

    def resume(self) -> bool:
        """Let it go on. Return False if it isn't stopped."""
        raise self.backend.lack("resume", **self.words)

    def raise_retry(self) -> int:
        """Start a failed job again. Return the number of this retry."""
        raise self.backend.lack("retry", **self.words)

    @property
    def words(self) -> dict[str, str]:
        """Return its words for what its place hasn't got."""
        return {"job": self.name, "at": self.at, "command": typed_command(self.job, self.backend.again)}

    @abstractmethod
    def delete(self) -> str:
        """Delete it, after a save if it runs. Return a sentence about what stays. Raises Failed."""

    @property
    def log_uid(self) -> str:
        """Return the uid of the start whose log is read; '' for the newest one of its name."""
        return self.uid

    def lines(self, selection: LogSelection, say: Say) -> AsyncGenerator[str, None]:
        """Yield the lines of its log that exist now. `say` gets what else a person should know. Use `aclosing`."""
        from lockstep.platforms.jobs.runs import folder_lines

        return self._log(selection, say, lambda place, folder, request: folder_lines(place, folder, **request))

    def follow(self, selection: LogSelection, say: Say) -> AsyncGenerator[str, None]:
        """Yield the lines that come until the job has ended. Use `aclosing`."""
        from lockstep.platforms.jobs.runs import followed

        return self._log(selection, say, lambda place, folder, request: followed(place, folder, request, lambda: self.is_over(say)))

    async def _log(
        self, selection: LogSelection, say: Say, read: Callable[[Place, str, Object], AsyncGenerator[str, None]]
    ) -> AsyncGenerator[str, None]:
        request = {"uid": self.log_uid, **request_of(selection, time.time())}
        async with self.volume(selection.node, say) as volume, aclosing(read(volume.place, volume.run_folder(self.name), request)) as lines:
            async for line in lines:
                yield line

    async def show_to_its_end(self, selection: LogSelection) -> int:
        """Print its log until it has ended. Return the exit code: 0 complete, 1 failed."""
        async with aclosing(self.follow(selection, say)) as lines:
            async for line in lines:
                put(line, flush=True)
        return FAILED if is_true(await in_thread(self.look_again), "Failed") else 0

    async def is_over(self, say: Say) -> bool:
        """Return True if no line of its log will come any more. `say` hears what a person who follows it should know."""
        return has_ended(self.look_again())

    def trainer(self, node: int, say: Say) -> AbstractAsyncContextManager[Volume]:
        """Open the files of a node as `volume` does, where Python has the trainer's packages."""
        return self.volume(node, say)

    def beside_ranks(self, gpus: int, say: Say) -> AbstractAsyncContextManager[Volume]:
        """Open the files of node 0 as `trainer` does, where a model may be loaded beside a training: on `gpus` free GPUs; 0: on CPUs."""
        return self.trainer(0, say)

    async def commits(self, verb: str, options: Sequence[str], say: Say) -> tuple[str, int]:
        """Return the answer of the trainer's `inspect` about its commits, and the exit code: 0, or 1 for bad news.

        Raises ConfigError for shards that are spread over several volumes, Failed where the files can't be read.
        """
        from lockstep.platforms.files.results import inspected

        nodes = self.nodes_with_volumes()
        if len(nodes) > 1:
            raise ConfigError(
                f"job {self.name} has one volume per pod, and its shards are spread over {len(nodes)} of them: fetch them (lockstep cp"
                f" {self.name}:runs/{self.name}/checkpoints node-N --node N {self.backend.again}, N from {nodes[0]} to {nodes[-1]}) and"
                f" name the folders: lockstep checkpoint node-{nodes[0]} …{' --verify' * (verb == 'verify')}"
            )
        async with self.trainer(nodes[0] if nodes else 0, say) as volume:
            return await inspected(volume.place, verb, volume.run_folder(self.name), options)

    @property
    def pods(self) -> Target | None:
        """Return where its pods are; None where it has none."""
        return None

    def stop_script(self) -> int:
        """Stop the script that a dev environment runs, and keep its nodes. Return the exit code. Raises ConfigError."""
        raise self.backend.lack("--run", **self.words)

    def ranks(self, node: int) -> AbstractAsyncContextManager[Volume]:
        """Open the files of a node where its ranks run, and no other place that has them. Raises Failed when they can't be reached."""
        return self.volume(node, lambda _: None)

    async def volumes_to_fill(self, say: Say) -> Volumes:
        """Return its volumes, where programs have the variables of its ranks and all the time that a large download takes."""
        return {f"node {node}": self.trainer(node, say) for node in self.nodes_with_volumes()}

    def spot(self, node: int, *, ports: bool) -> AbstractAsyncContextManager[Spot]:
        """Open a node for a person's programs. `ports`: its ports are meant, too. Raises ConfigError where there is none, Failed where it
        can't be reached.
        """
        raise self.backend.lack("shell", **self.words)

    def nodes_with_volumes(self) -> list[int]:
        """Return the nodes that have files of their own."""
        return [0]

    @abstractmethod
    def volume(self, node: int, say: Say) -> AbstractAsyncContextManager[Volume]:
        """Open the files of a node, also when nothing of the job runs. Raises Failed when they can't be reached."""
