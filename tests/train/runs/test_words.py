"""Words and exit codes of every verb about runs of this machine: those of the table that pods and hosts answer by, too."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from support.checkout import ROOT
from support.clusters.bed_jobs import JOB
from support.in_process import lockstep
from support.verb_words import HERE, JOBS, STOPPED, UNDISTURBED, Where, differences, script


def test_verbs_about_runs_of_this_machine_say_what_they_say_elsewhere(tmp_path: Path) -> None:
    place = tmp_path / "place"
    (place / "workspace").mkdir(parents=True)
    (place / "datasets").mkdir()
    again = ("--local", "--workspace", str(place))
    with ExitStack() as stack:
        runs = {}
        for name, path in JOBS.items():
            (place / "workspace" / path).write_text(script(name))
            file = tmp_path / f"{name}.yaml"
            file.write_text(JOB.format(name=name, nodes=2, steps=1, restarts=int(name == "runs")).replace("rank.py", path))
            command = [sys.executable, "-m", "lockstep.cli.main", "run", "-f", str(file), *again]
            runs[name] = stack.enter_context(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            stack.callback(runs[name].kill)
        assert (runs["done"].wait(90), runs["broke"].wait(90)) == (0, 1)
        assert lockstep("wait", "runs", "--for", "Running", "--timeout", "60", *again).returncode == 0
        where = Where(HERE, again, f"in workspace {place}", elsewhere="; --workspace names another one")
        assert differences(where, UNDISTURBED, tmp_path) == []
        assert differences(where, STOPPED, tmp_path) == []
        runs["runs"].wait(60)
