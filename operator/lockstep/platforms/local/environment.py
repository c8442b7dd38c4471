"""The environment that has torch and the trainer's packages, in which a command goes on that needs them."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.api.errors import Failed
from lockstep.platforms.output import flush_output, tell

TORCH = ("torch",)


def in_full_environment(needs: Sequence[str] = TORCH, check: Callable[[], object] = lambda: None) -> None:
    """Return if this Python has the packages; else type the same command line in one that has torch and the trainer's, made first if it
    isn't there.

    Call it before anything is asked, read from standard input or printed. `check` is called before anything is fetched: it raises where the
    command could not go on anyway. Raises Failed and ConfigError where that Python can't be made.
    """
    lacking = [package for package in needs if importlib.util.find_spec(package) is None]
    if not lacking:
        return
    check()
    from lockstep.environments import full_environment

    python = full_environment(lambda text: tell(f"lockstep: {text}"))
    if Path(sys.prefix) == python.parent.parent:
        raise Failed(
            f"{sys.executable} has no {lacking[0]}, which it was made with: remove {python.parent.parent} and"
            f" {python.parents[1] / 'packages'}, and repeat"
        )
    tell(f"lockstep: {sys.executable} has no {lacking[0]}: going on with {python}")
    flush_output()
    script = python.with_name(Path(sys.argv[0]).name)
    os.execv(python, [str(python), str(script if script.exists() else python.with_name("lockstep")), *sys.argv[1:]])  # noqa: S606 (the same command)
