"""`make quickstart HOSTS=1`: a real training over ssh on two hosts of this machine, from nothing to an adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.clusters.bed_hosts import BedHosts
from support.clusters.bed_jobs import BedJobs


@pytest.mark.long
def test_the_quickstart_trains_on_hosts_and_begins_anew_when_it_is_typed_again(
    bed: BedHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_DEVCLUSTER", str(bed.layout.index))
    monkeypatch.setenv("LOCKSTEP_STATE", str(tmp_path))
    laptop = BedJobs(bed, tmp_path)
    for line in ("==> Train: lockstep run", "==> Train from the beginning"):
        done = laptop.start("quickstart", "--hosts")
        assert line in done.stdout
        assert "Honey (right)" in done.stdout and "eval loss after" in done.stdout
    assert "Complete" in laptop.about("get", "demo").stdout
    described = json.loads(bed.console(0, "cat", "/home/ada/lockstep/workspace/runs/demo/adapter/adapter_config.json"))
    assert described["base_model_name_or_path"] == "/workspace/models/tiny-base", "as the job names it, and not as this host has it"
    laptop.about("delete", "demo")
