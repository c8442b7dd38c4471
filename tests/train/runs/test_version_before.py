"""A run that the version before has started on this machine is this one's to show, follow, stop and go on with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.clusters.bed_hosts import eventually
from support.in_process import lockstep
from support.release.version_before import program_before

JOB = """\
apiVersion: lockstep.dev/v1alpha1
kind: TrainingJob
metadata: {name: old}
spec: {nodes: 2, gpusPerNode: 0, restart: {maxRestarts: 0}, script: {path: counts.py}}
"""
COUNTS = """\
import os, signal, sys, time
from pathlib import Path
count, asked = Path(f"{__file__}.{os.environ['RANK']}"), []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
step = int(count.read_text()) if count.exists() else 0
print("from step", step, flush=True)
while step < 3 and not asked:
    while step == 2 and not (asked or Path(f"{__file__}.go").exists()):
        time.sleep(0.1)
    step += not asked
    count.write_text(str(step))
"""
"""A script whose files are its checkpoints. It waits before its last step for a file."""


def test_a_run_of_the_version_before_is_followed_stopped_and_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "place/workspace/counts.py"
    (tmp_path / "place/datasets").mkdir(parents=True)
    script.parent.mkdir()
    script.write_text(COUNTS)
    counts = [Path(f"{script}.{rank}") for rank in range(2)]
    job, place = tmp_path / "old.yaml", ("--cluster", str(tmp_path / "place"))
    job.write_text(JOB)
    program = [sys.executable, *program_before(tmp_path / "before")]
    typed = [*program, "run", "-f", str(job), "--local", "--workspace", str(tmp_path / "place")]
    with subprocess.Popen(typed, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}) as run:
        try:
            assert eventually(lambda: all(count.exists() and count.read_text() == "2" for count in counts))
            assert " Running " in lockstep("get", *place).stdout
            assert "from step 0" in lockstep("logs", "old", *place).stdout
            stopped = lockstep("stop", "old", *place)
            assert stopped.returncode == 0, stopped
        finally:
            run.terminate()
    assert " Suspended " in lockstep("get", *place).stdout
    Path(f"{script}.go").touch()
    again = subprocess.run(
        [sys.executable, "-m", "lockstep.cli.main", "run", "-f", str(job), *place], capture_output=True, text=True, check=False
    )
    assert again.returncode == 0 and "from step 2" in again.stdout, again
