"""The command line in this process: starting one for each verb costs seconds that say nothing of the verb."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass

import pytest

from lockstep.cli.main import main


@dataclass(frozen=True)
class Told:
    returncode: int
    stdout: str
    stderr: str


def lockstep(*words: str) -> Told:
    """Type `lockstep WORDS` with nobody at the terminal."""
    out, errors = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        patch.setattr("sys.argv", ["lockstep", *words])
        patch.setattr("sys.stdin", io.StringIO())
        patch.setenv("COLUMNS", "200")
        try:
            code: object = main()
        except SystemExit as ended:
            code = ended.code
    out.seek(0)
    return Told(code if isinstance(code, int) else 0, out.read(), errors.getvalue())
