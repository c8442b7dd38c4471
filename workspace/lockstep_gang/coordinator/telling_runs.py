"""The story of a dev environment in node 0's log: what was asked for and how it ended, and when nobody uses the environment."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep_gang.contract.run import Run
from lockstep_gang.contract.text import number_of
from lockstep_gang.lifecycle.gang import Gang
from lockstep_gang.lifecycle.idle import line
from lockstep_gang.lifecycle.session import older_scripts
from lockstep_gang.lifecycle.session_state import Request


def runs(before: Gang, after: Gang, run: Run) -> Iterator[str]:
    """Nothing of a Batch job."""
    old, new = before.session, after.session
    if new.request is not None:
        yield from _asked(old.request, new.request, run)
    if new.last is not None and new.last != old.last:
        yield f"{new.last.message} (exit code {new.last.exit_code})"
    if new.idleness is not old.idleness:
        yield line(new, run)


def _asked(old: Request | None, new: Request, run: Run) -> Iterator[str]:
    same = old is not None and old.asked.id == new.asked.id
    if not same:
        yield f"{new.asked.by} asks for: {new.asked.text}"
    if len(new.found) == run.nodes and (old is None or not same or len(old.found) < run.nodes):
        others = older_scripts(new)
        if others:
            yield f"warning, {new.asked.command[0]} on node {others[0]} is not the same as on node 0: `lockstep sync` sends yours to every node"


def start_line(gang: Gang, run: Run) -> str:
    """Instead of a Batch job's banner: an environment starts many attempts."""
    asked = gang.session.request
    what = asked.asked.text if asked is not None else "nothing"
    return f"attempt {gang.attempt} starts: {what}: {number_of(run.world_size, 'rank')} on {number_of(run.nodes, 'node')}"
