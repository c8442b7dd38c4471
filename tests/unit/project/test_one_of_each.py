"""Readers of a machine and writers of whole files: one of each, and the exceptions by name."""

from __future__ import annotations

import re

import pytest

from support.checkout import ROOT

MACHINE, PLATFORMS = "workspace/lockstep_machine", "operator/lockstep/platforms"
WRITERS = {
    "workspace/lockstep_spec/files.py",
    "workspace/train_multi_node.py",  # stands alone
    "workspace/lockstep_train/fetch/fetch.py",  # goes on with a part of an earlier start
    f"{PLATFORMS}/inpod/carry.py", f"{PLATFORMS}/hosts/wheelhouse.py",  # take the rest of a file
}  # fmt: skip
ONE_OF_EACH = {
    "the path of nvidia-smi": (r"which\([^)]*nvidia-smi", {f"{MACHINE}/gpus.py"}),
    "nvidia-smi's rows": (r"noheader", {f"{MACHINE}/gpus.py"}),
    "the kernel's tables of networks": (r"net/(?:tcp|dev|if_inet6)|/ \"net\"", {f"{MACHINE}/network.py"}),
    "limits of control groups": (r"memory\.max|memory\.limit_in_bytes|cpu\.max|cfs_\{?(?:part|quota|period)", {f"{MACHINE}/limits.py"}),
    "a process's stat file": (r"rpartition\(\"\)\"\)\[2\]", {f"{MACHINE}/readings.py"}),
    "a user's name": (r"getpwuid\([^)]*\)\.pw_name", {f"{MACHINE}/readings.py"}),
    "files that are whole or not there": (r"\b(?:draft|temporary|part)\.(?:replace|rename)\((?:path|out)\)|os\.replace\(", WRITERS),
}


@pytest.mark.parametrize(("pattern", "places"), ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_there_is_one_reader_or_writer_of_each_thing(pattern: str, places: set[str]) -> None:
    paths = [*(ROOT / "operator").rglob("*.py"), *(ROOT / "workspace").rglob("*.py")]
    matches = {path.relative_to(ROOT).as_posix() for path in paths if re.search(pattern, path.read_text())}
    assert matches and matches <= places
