"""Words and exit codes of every verb about jobs on hosts: those of the table that pods and this machine answer by, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.clusters.bed_hosts import BedHosts
from support.clusters.bed_jobs import JOB, BedJobs
from support.verb_words import HOSTS, JOBS, STOPPED, UNDISTURBED, Where, differences, script


@pytest.mark.long
def test_verbs_about_jobs_on_hosts_say_what_they_say_elsewhere(bed: BedHosts, tmp_path: Path) -> None:
    laptop = BedJobs(bed, tmp_path)
    laptop.clear()
    try:
        for name, path in JOBS.items():
            for number in range(bed.count):
                laptop.put(number, path, script(name).encode())
            file = tmp_path / f"{name}.yaml"
            file.write_text(JOB.format(name=name, nodes=2, steps=1, restarts=0).replace("rank.py", path))
            laptop.run(file, check=False)  # (two of them may have ended before they were seen to run)
        assert laptop.becomes("done", "Complete") and laptop.becomes("broke", "Failed") and laptop.becomes("runs", "Running")
        name = f"beds{bed.layout.index}"
        where = Where(
            HOSTS, ("--cluster", str(laptop.cluster)), f"on the hosts of {name}", have="they have", folder="/home/ada/lockstep/workspace", node="host bed0"
        )  # fmt: skip
        assert differences(where, UNDISTURBED, tmp_path) == []
        assert differences(where, STOPPED, tmp_path) == []
    finally:
        laptop.clear()
