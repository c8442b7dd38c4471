"""The version before this one, from this checkout's history: nothing was released yet, so a commit counts as it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.checkout import ROOT

BEFORE = "428b4e7a"
"""The last commit at which agents, hosts and runs of this machine read what they run on each by themselves. The first tag takes its
place.
"""
PROGRAM = """
import sys
sys.path[:0] = ["{tree}/operator", "{tree}/workspace"]
from lockstep.cli.main import main
sys.argv[0] = "lockstep"
sys.exit(main())
"""


def tree_before(folder: Path, commit: str = BEFORE) -> Path:
    """Unpack a commit into a folder that isn't there yet."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode != 0:
        pytest.fail(f"this checkout's history lacks commit {commit}, the older version: git fetch --unshallow ({packed.stderr.decode()})")
    folder.mkdir()
    subprocess.run(["tar", "--extract", "--directory", str(folder)], input=packed.stdout, check=True)
    return folder


def program_before(folder: Path) -> tuple[str, ...]:
    """Return options of Python that run the command line of the version before."""
    return "-c", PROGRAM.format(tree=tree_before(folder))
