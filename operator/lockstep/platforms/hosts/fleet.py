"""The hosts of a cluster file: asked all at once, each over its one shared connection. A host that doesn't answer is one finding among
others.
"""

from __future__ import annotations

import ast
import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

from lockstep.api.errors import Failed
from lockstep.api.hosts import Host, HostsCluster, cluster_words
from lockstep.plan.hosts.facts import BadAnswer, HostFacts, read_host
from lockstep.plan.hosts.status import Seen
from lockstep.plan.pages.stacks import RankAnswer, read_ranks, with_silent
from lockstep.platforms.hosts.place import HostPlace
from lockstep.platforms.hosts.ssh import Login, Shared, control_folder
from lockstep.platforms.inpod import rankstacks, source_of
from lockstep.platforms.onhost import look as look_program
from lockstep.programs import answer_of, python_output
from lockstep_gang.contract.layout import RankLayout

T = TypeVar("T")
AT_ONCE = 32
"""Hosts that are asked at the same time."""
ENVIRONMENT_PYTHON = "~/.local/share/lockstep/env/bin/python"
"""Python of the environment that `hosts setup` made last."""
LOOK_SECONDS = 30.0
LOOK_BYTES_MAX = 64 << 20


class Fleet:
    """Connections to hosts. They stay open for a minute after their last use, so that the next command starts at once."""

    def __init__(self, cluster: HostsCluster, name: str, named: str, tell: Callable[[str], None] = lambda _: None) -> None:
        """`name`: of the cluster file. `named`: the cluster as it was given, its name or the path of its file. `tell`: hears that a login
        may wait for you.
        """
        self.cluster, self.name = cluster, name
        self.typed, self.again = cluster_words(named)
        """The cluster as a word of a command line, and the words that lead here again on one."""
        folder = control_folder()
        self._shared = {host.name: Shared(login_of(host), folder, tell=tell) for host in cluster.hosts}

    def place(self, host: str) -> HostPlace:
        """Return the host as a place where programs run, by its own Python."""
        stated = self.cluster.host(host).python
        return HostPlace(self._shared[host], newer=(*([stated] if stated else []), ENVIRONMENT_PYTHON))

    def shared(self, host: str) -> Shared:
        """Return the host's shared connection."""
        return self._shared[host]

    async def all(
        self, hosts: Iterable[str], work: Callable[[str], Awaitable[T]], *, late_seconds: float | None = None
    ) -> tuple[dict[str, T], dict[str, str]]:
        """Do the work for every host at once, at most 32 at a time. Return what came of it, and by host why nothing came.

        `late_seconds`: how long a host is waited for after the last answer of another one and after its own start; None: as long as it
        takes.
        """
        limit, clock = asyncio.Semaphore(AT_ONCE), asyncio.get_running_loop().time
        results: dict[str, T] = {}
        problems: dict[str, str] = {}
        waiting: dict[str, asyncio.Timeout] = {}

        async def one(host: str) -> None:
            async with limit:
                waiting[host] = asyncio.timeout(late_seconds if results else None)
                try:
                    async with waiting[host]:
                        results[host] = await work(host)
                except (Failed, OSError, BadAnswer) as error:
                    is_late = waiting[host].expired()
                    problems[host] = f"host {host} has not answered {late_seconds:.0f} s after the others" if is_late else str(error)
                    return
                finally:
                    del waiting[host]
            if late_seconds is not None:
                for other in waiting.values():
                    if not other.expired():
                        other.reschedule(clock() + late_seconds)

        names = list(hosts)
        tasks = [asyncio.create_task(one(name)) for name in names]
        # Ctrl-C reaches every host's work, and this ends when all of it has cleaned up: a plain gather ends with the first, and cuts the
        # others short.
        for done in await asyncio.gather(*tasks, return_exceptions=True):
            if done is not None:
                raise done
        return {name: results[name] for name in names if name in results}, {name: problems[name] for name in names if name in problems}

    async def look(
        self,
        hosts: Iterable[str] | None = None,
        *,
        job: str = "",
        paths: Mapping[str, list[list[str]]] | None = None,
        starts: bool = False,
        late_seconds: float | None = None,
    ) -> tuple[dict[str, HostFacts], dict[str, str]]:
        """Ask every host (by default all) what it has. `job`: the only one to look for. `paths`: by host, inputs to look for.

        `starts`: for something that is to start there with the Python that the file states, whose version counts. `late_seconds`: as in
        `all`.
        """
        peers = [host.address for host in self.cluster.hosts if host.address is not None]

        async def one(name: str) -> HostFacts:
            host = self.cluster.host(name)
            others = [peer for peer in peers if peer != host.address]
            python = host.python if starts else None
            return await self._look_at(name, {"job": job, "peers": others, "paths": (paths or {}).get(name, []), "python": python})

        return await self.all(self.cluster.names if hosts is None else hosts, one, late_seconds=late_seconds)

    async def look_for(
        self, job: str, hosts: Sequence[str], patience: float = 0.0, *, late_seconds: float | None = None
    ) -> tuple[dict[str, HostFacts], dict[str, str]]:
        """Ask these hosts of a job for its state alone: it tells nothing of their GPUs and their units, which takes them longer.

        `patience`: seconds for which the first host, node 0's, waits with its answer until all ranks run or the job has ended.
        `late_seconds`: as in `all`.
        """

        async def one(name: str) -> HostFacts:
            return await self._look_at(name, {"job": job, "patience": patience if name == hosts[0] else 0.0})

        return await self.all(hosts, one, late_seconds=late_seconds)

    async def _look_at(self, name: str, request: dict[str, Any]) -> HostFacts:
        host, place = self.cluster.host(name), self.place(name)
        request |= {"workspace": host.workspace, "datasets": host.datasets, "ports": list(self.cluster.port_range)}
        text = await python_output(place, old_source_of(look_program), json.dumps(request), seconds=LOOK_SECONDS, most=LOOK_BYTES_MAX)
        return read_host(name, answer_of(text, place.name))


@asynccontextmanager
async def within(seconds: float, what: str, remedy: str = "") -> AsyncIterator[None]:
    """Raise Failed saying `what`, and what to do, if the block takes longer."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise Failed(f"{what} for {seconds:.0f} s{remedy}") from None


@cache
def old_source_of(program: ModuleType) -> bytes:
    """Text of a program of `onhost` for Python 3.6 or newer: with what it imports from there, and without annotations, which older ones
    can't read.
    """
    tree = ast.parse(source_of(program))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
    tree.body = [node for node in tree.body if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")]
    return ast.unparse(_Unannotated().visit(tree)).encode()


class _Unannotated(ast.NodeTransformer):
    """Makes a plain assignment of one with an annotation."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.Pass()
        return ast.copy_location(ast.Assign([node.target], node.value), node)


def login_of(host: Host) -> Login:
    """Return how a host of a cluster file is reached; what its file leaves out stands in ssh's own configuration."""
    return Login(host.name, host.user, host.port, host.jump, host.identity, host.host_key, host.address)


async def ask_ranks(fleet: Fleet, seen: Seen, rank: int | None) -> list[RankAnswer]:
    """Ask one rank of a job, or all of them, for their stacks, or why there are none."""

    async def one(host: str) -> list[RankAnswer]:
        record, place = seen.jobs[host].record, fleet.place(host)
        folder = "" if record is None else f"{record.workspace}/runs/{record.name}"
        printed = await python_output(place, source_of(rankstacks), json.dumps({"rank": rank, "run_dir": folder}))
        return read_ranks(answer_of(printed, place.name))

    by_host, problems = await fleet.all(seen.jobs, one)
    node_of = {host: node for node, host in enumerate(seen.hosts)}
    away = {node_of[host]: problem for host, problem in {**problems, **seen.problems}.items()}
    answers = [answer for one_host in by_host.values() for answer in one_host]
    return with_silent(answers, rank, away, RankLayout(seen.record.ranks))
