"""`lockstep top [JOB]`: how jobs get on, now."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.objects import Object, has_ended, is_run
from lockstep.cli.shared.jobargs import Form, TargetOptions, find_cluster_job, on_site
from lockstep.platforms.hosts.backend import HostsBackend
from lockstep.platforms.local.backend import LocalBackend
from lockstep.platforms.output import put, put_json, say
from lockstep_spec.words import number_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.text import Text

    from lockstep.kube.aim import Connections
    from lockstep.plan.pages.table import Unheard
    from lockstep.platforms.hosts.backend import HostsJob
    from lockstep.platforms.kubernetes.backend import KubernetesJob

Looks = AsyncGenerator[tuple[Object, list[str], bool], None]
EXIT_STALE = 1
CURVE_POINTS = 60
CURVE_SECONDS = 10.0
"""The loss curve is read so often; the rest with every look."""


@on_site
def top(
    where: TargetOptions,
    job: Annotated[
        str | None,
        typer.Argument(
            help=(
                "A job's name. Default: a line for each job of the namespace; on hosts and with --local: each machine, its GPUs and who"
                " uses them."
            ),
            show_default=False,
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one look and end. This is the default where the output isn't a terminal.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.5, help="Seconds between two looks.")] = 2.0,
    output: Annotated[Form, typer.Option("-o", "--output", help="text or json; json is one look.")] = Form.TEXT,
) -> None:
    """Watch a job: loss, speed, network, and every rank's load.

    It ends with the job. It shows the loss curve, speed, fabric, goodput, each node's CPU, memory and NICs, and each rank's CPU, memory and
    GPU.

    While you look, the pods report their load. This needs the right to run programs in pods; without it you see the rest. A narrow
    terminal shows fewer columns. Exit code 1 with --once: the operator is silent, so what you see may be old.

    Example: lockstep top demo
    """
    live = not once and output is Form.TEXT and sys.stdout.isatty()
    backend = where.backend()
    backend.hurried = True
    if isinstance(backend, LocalBackend):
        looks = _looks_of_folder(backend, job, interval)
    elif isinstance(backend, HostsBackend):
        looks = _looks_of_hosts(backend, interval) if job is None else _looks_of_host_job(backend.job(job), interval, live=live)
    elif job is None:
        looks = _looks_of_all(where, interval)
    else:
        looks = _looks_of_job(find_cluster_job(job, where), where.connections, interval, live=live)
    asyncio.run(_show(looks, output, live=live))


async def _show(looks: Looks, output: Form, *, live: bool) -> None:
    """Show each look: its values, its lines, and whether it is the last one."""
    # Closed here: the end of the loop would close it together with the programs that it asks, whichever comes first.
    async with aclosing(looks):
        with _screen(live) as put:
            await _until_over(looks, put, output, live=live)


async def _until_over(looks: Looks, put: Callable[[Iterable[str]], None], output: Form, *, live: bool) -> None:
    async for page, lines, over in looks:
        if output is Form.JSON:
            put_json(page)
        else:
            put(lines)
        if over or not live:
            if "stale" in page:
                raise typer.Exit(EXIT_STALE)
            return


@contextmanager
def _screen(live: bool) -> Iterator[Callable[[Iterable[str]], None]]:
    """Yield what shows lines in place of those before; where nothing is live, one after the other."""
    if not live:
        yield lambda lines: put(*lines)
        return
    from rich.live import Live

    with Live(auto_refresh=False, vertical_overflow="crop") as view:
        yield lambda lines: view.update(_text(within(list(lines), view.console.size.height)), refresh=True)


def within(lines: Sequence[str], height: int) -> Sequence[str]:
    """The lines that a terminal has room for, the last of which says how many it hasn't."""
    if len(lines) <= height:
        return lines
    return [*lines[: height - 1], f"… and {number_of(len(lines) - height + 1, 'line')}: enlarge the terminal, or use --once"]


def _text(lines: Iterable[str]) -> Text:
    from rich.text import Text

    from lockstep_spec.words import printable_line

    text = Text("\n".join(map(printable_line, lines)), no_wrap=True, overflow="ellipsis")
    text.highlight_words(["Running", "Complete", "verified"], "green")
    text.highlight_words(["Failed", "NOT as asked", "not running", "not seen"], "red")
    text.highlight_regex(r"(?m)^(loss|speed|fabric|checkpoint|goodput|NODE.*|RANK.*|HOST.*|NAME.*)", "bold")
    text.highlight_regex(r"[▁▂▃▄▅▆▇█]+", "cyan")
    return text


async def _looks_of_job(job: KubernetesJob, connections: Connections, interval: float, *, live: bool) -> Looks:
    from lockstep.kube.cluster import Cluster
    from lockstep.plan.pages.top import snapshot
    from lockstep.platforms.files.results import run_folder
    from lockstep.platforms.jobs.observe import operator_unheard
    from lockstep.platforms.jobs.top import NodesWatch, curve_on_volume, nodes_in_pods, of_job, pods_of

    name, namespace = job.name, job.namespace
    curve: Object = {}
    read = -CURVE_SECONDS
    measuring = (lambda line: None) if live else say
    async with (
        await Cluster.connect(connections) as cluster,
        NodesWatch(nodes_in_pods(cluster, namespace, name), of_job(name, run_folder(name)), measuring) as nodes,
    ):
        ask = nodes.ask if live else nodes.ask_all
        while True:
            now = time.monotonic()
            points = CURVE_POINTS if now - read >= CURVE_SECONDS else 0
            answers, status, pods, silent = await asyncio.gather(
                ask(points),
                asyncio.to_thread(job.look_again),
                pods_of(cluster, namespace, name),
                operator_unheard(cluster, namespace),
            )
            if points and answers.get(0, {}).get("curve"):
                curve, read = answers[0]["curve"], now
            over = has_ended(status)
            if over and not curve and "step" in status.get("trainer", {}):
                curve = await curve_on_volume(cluster, namespace, name, CURVE_POINTS, say)
            answers.setdefault(0, {})["curve"] = curve
            page = _with_age(snapshot({**job.job, "status": status}, pods, answers), None if over or is_run(job.job) else silent)
            yield page, _page(page), over
            await asyncio.sleep(interval)


async def _looks_of_all(where: TargetOptions, interval: float) -> Looks:
    from lockstep.kube.cluster import Cluster
    from lockstep.plan.pages.table import is_open
    from lockstep.plan.pages.top import overview, snapshot
    from lockstep.platforms.jobs.observe import operator_unheard

    place, backend = where.chosen_namespace(), where.backend()
    async with await Cluster.connect(where.connections) as connection:
        while True:
            jobs = [job.job for job in await asyncio.to_thread(backend.jobs)]
            unheard = await operator_unheard(connection, place) if any(map(is_open, jobs)) else None
            lines = list(overview(jobs)) if jobs else [f"there is no TrainingJob in namespace {place}"]
            page = _with_age({"jobs": [snapshot(job, (), {}) for job in jobs]}, unheard)
            yield page, [*lines, *([page["stale"]["message"]] if "stale" in page else [])], False
            await asyncio.sleep(interval)


async def _looks_of_folder(backend: LocalBackend, job: str | None, interval: float) -> Looks:
    from lockstep.platforms.local.records import LocalLooks

    if job is None:
        async for look in _looks_of_machine(backend.root, interval):
            yield look
        return
    found = backend.job(job).backend
    looks = LocalLooks(job, found.root, found.again)
    while True:
        page, over = await asyncio.to_thread(looks.look, CURVE_POINTS)
        yield page, _page(page), over
        await asyncio.sleep(interval)


async def _looks_of_host_job(job: HostsJob, interval: float, *, live: bool) -> Looks:
    """Look at a job with its ranks. A host that doesn't answer is shown as not seen."""
    from lockstep.plan.pages.top import machine_node, snapshot
    from lockstep.platforms.jobs.top import NodesWatch, nodes_at, of_job
    from lockstep_gang.contract.layout import RankLayout

    fleet, layout = job.backend.fleet(), RankLayout(job.seen.record.ranks)
    roots = {node: record.workspace for node, host in enumerate(job.seen.hosts) if (record := job.record_on(host)) is not None}
    folders = {node: f"{workspace}/runs/{job.name}" for node, workspace in roots.items()}
    places = {node: fleet.place(host) for node, host in enumerate(job.seen.hosts) if node in folders}
    curve: Object = {}
    read = -CURVE_SECONDS
    measuring = (lambda line: None) if live else say
    async with NodesWatch(nodes_at(places), of_job(job.name, folders, machine=True), measuring) as watch:
        while True:
            now = time.monotonic()
            points = CURVE_POINTS if now - read >= CURVE_SECONDS else 0
            answers, status = await asyncio.gather(watch.ask(points), job.current())
            if points and answers.get(0, {}).get("curve"):
                curve, read = answers[0]["curve"], now
            nodes = []
            for node, host in enumerate(job.seen.hosts):
                answer = {"problem": job.seen.problems[host]} if host in job.seen.problems else answers.get(node, {})
                nodes.append({**machine_node(host, layout.ranks_of(node), answer), "node": node})
            page = {**snapshot(job.job, (), {0: {"curve": curve}}), "nodes": nodes}
            yield page, _page(page), has_ended(status)
            await asyncio.sleep(interval)


async def _looks_of_hosts(backend: HostsBackend, interval: float) -> Looks:
    """Look at the load of every host of a cluster file, and who uses its GPUs."""
    from lockstep.plan.pages.hosts import hosts_page, hosts_view
    from lockstep.platforms.jobs.top import NodesWatch, nodes_at, of_hosts

    fleet = backend.fleet()
    folders = [(host.workspace, host.datasets) for host in backend.hosts.hosts]
    async with NodesWatch(nodes_at([fleet.place(name) for name in backend.hosts.names]), of_hosts(backend.name, folders), say) as watch:
        while True:
            answers = await watch.ask(0)
            view = hosts_view(backend.name, {name: answers.get(number, {}) for number, name in enumerate(backend.hosts.names)})
            yield view, list(hosts_page(view, _width())), False
            await asyncio.sleep(interval)


async def _looks_of_machine(workspace: Path, interval: float) -> Looks:
    """Look at this machine as at a host of a cluster."""
    import socket

    from lockstep.plan.pages.hosts import hosts_page, hosts_view, read_host
    from lockstep.platforms.inpod.hostload import HostWatch
    from lockstep.platforms.local.records import FIRST_SECONDS

    watch = HostWatch(str(workspace / "workspace"), str(workspace / "datasets"))
    await asyncio.sleep(FIRST_SECONDS)
    while True:
        answer = read_host(await asyncio.to_thread(watch.answer))
        view = hosts_view("local", {socket.gethostname(): answer})
        yield view, list(hosts_page(view, _width())), False
        await asyncio.sleep(interval)


def _width() -> int | None:
    """Columns of the terminal; None if the output isn't one."""
    import shutil

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _with_age(look: Object, unheard: Unheard | None) -> Object:
    return look if unheard is None else {**look, "stale": {"since": unheard.since, "message": unheard.text(time.time())}}


def _page(look: Object) -> list[str]:
    from lockstep.plan.pages.top import top_page

    lines = list(top_page(look, time.time(), _width()))
    return [*lines[:1], *([f"  {look['stale']['message']}"] if "stale" in look else []), *lines[1:]]
