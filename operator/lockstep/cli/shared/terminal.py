"""Tables and progress on the terminal: steps of a verb, waiting, transfers. One line is written over there; elsewhere there are lines now
and then.

Tables are colored in a terminal, and have no escape code where NO_COLOR is set or nobody looks.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.cli.shared.signals import exiting_on_ctrl_c
from lockstep.platforms.output import put, put_over, tell
from lockstep_spec.words import duration, printable_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from lockstep.plan.cluster.finding import Finding
    from lockstep.platforms.jobs.shortresults import ShortRuns

T = TypeVar("T")


def is_plain() -> bool:
    """Return True if NO_COLOR is set, and not to nothing (no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


PIPED_WIDTH = 240
"""A pipe has no width: neither paths nor lines are cut for whoever reads it, short of this."""


def console(**options: Any) -> Console:
    """rich's own NO_COLOR leaves bold and underlined text, which a log or a plain terminal shows as rubbish.

    Text stands as it is, brackets and colons too, and what a terminal would act on as escapes (`output.py`).
    """
    from rich.console import Console
    from rich.text import Text

    class Plain(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable_line(text), **options)

    plain = Plain(color_system=None if is_plain() else "auto", markup=False, emoji=False, **options)
    if not plain.is_terminal:
        plain.width = PIPED_WIDTH
    return plain


def confirm(question: str, refusal: str) -> None:
    """Ask a person. Raises ConfigError with `refusal` where nobody can be asked, and typer's Abort when the answer is no."""
    if not sys.stdin.isatty():
        raise ConfigError(refusal)
    typer.confirm(printable_line(question), abort=True)


LOG_IN = "your login is not accepted: log in again (oc login, or your provider's command), or use another --context"
LACKING = "an administrator of the namespace can grant it (the built-in roles view and edit), or use another namespace with -n"
LACKING_EVERYWHERE = (
    "an administrator of the cluster can grant it, by a ClusterRoleBinding; for the jobs of one namespace (-n NAMESPACE) the built-in role"
    " view there is enough"
)
AT_CLUSTER_SCOPE = " at the cluster scope"
"""The API server's words where a right is missing in all namespaces, or on a kind that is in none."""


def with_advice(error: Failed) -> str:
    """Return what the error says, and what helps against a login that isn't accepted, or a right that is lacking."""
    message, status = str(error), getattr(error, "status", None)
    lacking = LACKING_EVERYWHERE if AT_CLUSTER_SCOPE in message else LACKING
    advice = LOG_IN if status == 401 else lacking if status == 403 and " cannot " in message else None
    return f"{message}: {advice}" if advice else message


def put_findings(findings: Iterable[Finding], width: int | None = None) -> None:
    """Print a line for each finding, and below it what to do. `width`: of a column of subjects; without it a colon ends each."""
    for one in findings:
        subject = f"{one.subject}:" if width is None else f"{one.subject:{width}}"
        put(f"{one.outcome.value:8} {subject} {one.message}")
        if one.fix:
            put(f"{'':{8 if width is None else 9 + width}} → {one.fix}")


class Progress:
    """`now` is what happens, `done` what has happened and stays."""

    def __init__(self) -> None:
        self._status: Status | None = None
        self._told = ""
        if sys.stdout.isatty() and not is_plain():
            self._status = console(highlight=False).status("")

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._status is not None:
            self._status.stop()

    def now(self, text: str) -> None:
        """Show it for the moment on a terminal; elsewhere print a line, unless it is what was said last."""
        if self._status is not None:
            from rich.text import Text

            self._status.update(Text(printable_line(text)))
        elif text != self._told:
            put(f"… {text}", flush=True)
        self._told = text

    def quietly(self, text: str) -> None:
        """Show it only on a terminal: steps too many and too short for a log."""
        if self._status is not None:
            self.now(text)

    def done(self, what: str, text: str) -> None:
        put(f"{what:<12} {text}", flush=True)


AT_FIRST_SECONDS, AT_A_TERMINAL_SECONDS, ELSEWHERE_SECONDS = 0.2, 1.0, 10.0


@contextmanager
def waiting(what: str) -> Iterator[Callable[[], None]]:
    """Say on standard error that `what` goes on, and for how long, until the block ends or what it yields is called.

    At a terminal that is one line, there almost at once, which counts the seconds and goes in the end; elsewhere a line every ten seconds.
    """
    over, terminal, begun = threading.Event(), sys.stderr.isatty() and not is_plain(), time.monotonic()

    def show() -> None:
        width, seconds = 0, AT_FIRST_SECONDS if terminal else ELSEWHERE_SECONDS
        while not over.wait(seconds):
            seconds = AT_A_TERMINAL_SECONDS if terminal else ELSEWHERE_SECONDS
            line = f"… {what}, {duration(time.monotonic() - begun)}"
            if not terminal:
                tell(line)
                continue
            put_over(line, width)
            width = len(line)
        if width:
            put_over("", width)

    thread = threading.Thread(target=show, name="waiting", daemon=True)
    thread.start()

    def stop() -> None:
        over.set()
        thread.join()

    try:
        yield stop
    finally:
        stop()


def result_of(runs: ShortRuns, make: Callable[[ShortRuns], Coroutine[Any, Any, T]], what: str = "") -> T:
    """Return the result of a short run; say that `what` goes on, if the run is silent; on Ctrl-C, say what is left, and exit with 130."""
    with exiting_on_ctrl_c(f"lockstep: interrupted; {runs.left}"), waiting(what) if what and runs.silent else nullcontext():
        return asyncio.run(make(runs))
