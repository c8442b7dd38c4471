"""What `doctor` reads out of the Python of a host's ranks."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

from lockstep.plan.hosts.check import COMPARED
from lockstep.platforms.hosts.environment import trainer_archive
from lockstep.platforms.onhost.condition import LIBRARIES, PACKAGES


def test_the_version_of_the_trainer_that_a_host_was_set_up_with_is_read_and_compared(tmp_path: Path) -> None:
    zipfile.ZipFile(io.BytesIO(trainer_archive("4.5.6"))).extractall(tmp_path)
    command = [sys.executable, "-S", "-c", LIBRARIES, *PACKAGES]
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["packages"] == {"lockstep-trainer": "4.5.6"}
    assert PACKAGES == COMPARED
