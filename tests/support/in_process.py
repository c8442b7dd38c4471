"""The command line in this process: starting one for each verb costs seconds that say nothing of the verb."""

from __future__ import annotations

import contextlib
import gc
import io
import sys
from dataclasses import dataclass

import pytest

from lockstep.cli.main import main


@dataclass(frozen=True)
class Told:
    returncode: int
    stdout: str
    stderr: str


def lockstep(*words: str, stdin: str = "") -> Told:
    """Type `lockstep WORDS` with nobody at the terminal, and with `stdin` on standard input."""
    usual = gc.get_threshold()
    out, errors = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        patch.setattr("sys.argv", ["lockstep", *words])
        patch.setattr("sys.stdin", io.StringIO(stdin))
        patch.setattr("sys.excepthook", sys.excepthook)  # as it is: `main` sets another one
        for name, value in {"COLUMNS": "200", "NO_COLOR": "1", "_TYPER_FORCE_DISABLE_TERMINAL": "1"}.items():
            patch.setenv(name, value)
        try:
            code: object = main()
        except SystemExit as ended:
            code = ended.code
            if isinstance(code, str):  # as Python does
                print(code, file=errors)
        finally:
            gc.set_threshold(*usual)
    out.seek(0)
    return Told(code if isinstance(code, int) else int(code is not None), out.read(), errors.getvalue())
