"""Words and exit codes of every verb about runs of this machine: those of the table that pods and hosts answer by, too."""

from __future__ import annotations

from pathlib import Path

from support.clusters.cluster_jobs import SCRIPTS
from support.verb_words import HERE, JOBS, Where, live


def test_runs_of_this_machine_live_as_jobs_do_elsewhere(tmp_path: Path) -> None:
    place = tmp_path / "place"
    (place / "workspace").mkdir(parents=True)
    (place / "datasets").mkdir()
    for path in JOBS.values():
        (place / "workspace" / path).write_text(SCRIPTS[path])
    where = Where(HERE, ("--cluster", str(place)), f"in workspace {place}", elsewhere="; --cluster names another one")
    live(where, tmp_path)
