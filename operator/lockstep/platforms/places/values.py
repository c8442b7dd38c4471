"""Values that places where jobs run take and give, and what is known of a place and of a job without asking it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import DATASETS, WORKSPACE
from lockstep.api.objects import Object, typed_command
from lockstep.platforms.places.orders import ELSEWHERE, LACKS, lack

if TYPE_CHECKING:
    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.api.hosts import Host
    from lockstep.platforms.clusters.target import Target
    from lockstep.programs import Place

POLL_SECONDS = 0.5
"""Between two looks at what is waited for."""
STOP_SECONDS = 600.0
"""Longest time for which a job that saves and stops is waited for."""
Say = Callable[[str], None]


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


class Use(Enum):
    """Use of a node's files, which says where programs see them."""

    READ = "any place, also when nothing of the job runs"
    RANKS = "where its ranks run, and no other place"
    TRAINER = "where Python has the trainer's packages"
    MODEL = "where a model may be loaded beside a training"
    FILL = "where programs have the variables of its ranks and all the time that a large download takes"

    @property
    def needs_trainer(self) -> bool:
        """Return True if the trainer's packages are imported there."""
        return self not in (Use.READ, Use.RANKS)


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


Volumes = Mapping[str, AbstractAsyncContextManager[Volume]]
"""Name of each node that has files of its own → these, which are opened by entering it."""


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


class NamedPlace(Protocol):
    """A place as a command line names it. A backend asks for what it needs."""

    def target(self) -> Target:
        """Return the API server and the namespace that are meant."""

    def of_hosts(self) -> tuple[ClusterFile, str]:
        """Return the cluster file of hosts, and the cluster as it was given."""

    def workspaces(self) -> Sequence[Path]:
        """Return the workspace of this machine that is meant, and those that are looked into beside it."""


class Words(NamedTuple):
    """Words for a place."""

    again: str
    """Words that lead here again on a command line, after a job's name: `-n team`, `--cluster lab`, `--local`."""
    where: str
    """Place in messages: `in namespace team`, `on the hosts of lab`."""
    name: str = ""
    """Folder of a workspace of this machine."""
    noun: str = "job"
    """Name of a job's kind in messages."""
    have: str = "it has"
    """Words before the jobs that are here."""
    elsewhere: str = ""
    """Option that names another such place, for a job that isn't here; '' where none does."""

    def no_such_job(self, name: str, names: Iterable[str]) -> str:
        """Explain a job that isn't here, where these are."""
        from lockstep.api.files.problems import nearest

        every = sorted(names)
        close = nearest(name, every)
        hint = f"; did you mean {close}?" if close else self.elsewhere and f"; {self.elsewhere}"
        return f"there is no {self.noun} {name} {self.where}: {self.have} {', '.join(every) or 'none'}{hint}"


class KnownPlace(Protocol):
    """Facts of a place, known without asking it."""

    kind: str
    """Its name in `backends`."""
    words: Words
    has_operator: bool = False
    """True if an operator keeps the jobs here: their status, and what happens to them while nobody looks."""
    has_namespaces: bool = False
    """True if an API server keeps the jobs here, in namespaces. Elsewhere a job keeps the command that starts it again."""
    hurried: bool = False
    """True: only a moment is waited for a part of this place that doesn't answer though others have, and what is shown says so."""

    def lack(self, what: str, **words: object) -> ConfigError:
        """Return the error about what this place hasn't got, by `LACKS`. `words`: `KnownJob.words`."""
        return lack(self.kind, what, **self.words._asdict(), **words)

    def refuse(self, what: str, stated: object = True, **words: object) -> None:
        """Raise ConfigError for what is stated and this place hasn't got."""
        row = LACKS.get(what, {})
        if stated and (self.kind in row or (ELSEWHERE in row and not self.has_operator)):
            raise self.lack(what, **words)

    def default_nodes(self, job: Object) -> int | None:
        """Return the number of nodes of a job that states none; None where nobody knows."""
        return (job.get("status") or {}).get("nodes") or None


class KnownJob(Protocol):
    """Facts of a job, known without asking its place. `job` is a TrainingJob with its status, as an API server has it."""

    backend: KnownPlace
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
        return f"{self.name} {self.backend.words.again}".rstrip()

    @property
    def words(self) -> dict[str, str]:
        """Return its words for what its place hasn't got."""
        return {"job": self.name, "at": self.at, "command": typed_command(self.job, self.backend.words.again)}

    @property
    def pods(self) -> Target | None:
        """Return where its pods are; None where it has none."""
        return None
