"""Files to and from hosts over ssh: `cp` and `sync`, before and after a job's first start."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from lockstep.devcluster.hosts import bed as running
from support.clusters.bed_hosts import BedHosts
from support.clusters.bed_jobs import BedJobs


@pytest.fixture
def laptop(bed: BedHosts, tmp_path: Path) -> BedJobs:
    return BedJobs(bed, tmp_path)


def test_a_copy_goes_to_all_hosts_before_a_job_was_ever_started_and_comes_back_whole(laptop: BedJobs, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_bytes(os.urandom(3 << 20))
    (folder / "config.json").write_text("{}")
    where = ["--cluster", str(laptop.cluster)]
    done = laptop.type("cp", str(folder), "new:/workspace/models/x", *where)
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["host bed0", "host bed1", "host bed2"]
    digest = hashlib.sha256((folder / "weights").read_bytes()).hexdigest()
    for number in range(3):
        assert digest in laptop.bed.console(number, "sha256sum", "/home/ada/lockstep/workspace/models/x/weights")
    assert "2 files were there already" in laptop.type("cp", str(folder), "new:/workspace/models/x", *where).stdout
    laptop.type("cp", "new:/workspace/models/x/weights", str(tmp_path / "back"), "--node", "2", *where)
    assert (tmp_path / "back").read_bytes() == (folder / "weights").read_bytes()
    outside = laptop.type("cp", str(folder), "new:/etc/x", *where, check=False)
    assert outside.returncode == 2 and "choose a path below /datasets, /workspace" in outside.stderr
    running.plug(laptop.bed.host(1), plugged=False)
    partly = laptop.type("cp", str(folder), "new:/datasets/y", *where, check=False)
    assert (
        partly.returncode == 1
        and "host bed1: not copied: host bed1 can't be reached" in partly.stderr
        and "host bed0: 2 of 2 files copied" in partly.stdout
    )


def test_a_sync_sends_what_differs_to_all_hosts_and_takes_back_what_is_gone(laptop: BedJobs, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text("print(1)\n")
    (code / "old.py").write_text("")
    words = ["sync", "new", str(code), "--cluster", str(laptop.cluster)]
    assert "host bed2: 2 sent" in laptop.type(*words).stdout
    (code / "old.py").unlink()
    (code / "train.py").write_text("print(2)\n")
    assert "host bed0: 1 sent (" in laptop.type(*words).stdout
    for number in range(3):
        assert laptop.bed.console(number, "sh", "-c", "cd /home/ada/lockstep/workspace; cat train.py; ls").split("\n")[0] == "print(2)"
