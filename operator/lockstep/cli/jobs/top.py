"""`lockstep top [JOB]`: how jobs get on, now."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.shared.jobargs import Form, TargetOptions, on_site
from lockstep.platforms.jobs.looks import Looks
from lockstep.platforms.output import put, put_json
from lockstep_spec.words import number_of, printable_line

if TYPE_CHECKING:
    from rich.text import Text


EXIT_STALE = 1
LOOK_SECONDS = 2.0
"""Between two looks."""


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
    looks = where.backend(hurried=True).looks(job, LOOK_SECONDS, live=live)
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

    text = Text("\n".join(map(printable_line, lines)), no_wrap=True, overflow="ellipsis")
    text.highlight_words(["Running", "Complete", "verified"], "green")
    text.highlight_words(["Failed", "NOT as asked", "not running", "not seen"], "red")
    text.highlight_regex(r"(?m)^(loss|speed|fabric|checkpoint|goodput|NODE.*|RANK.*|HOST.*|NAME.*)", "bold")
    text.highlight_regex(r"[▁▂▃▄▅▆▇█]+", "cyan")
    return text
