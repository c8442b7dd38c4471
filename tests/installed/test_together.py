"""Verbs of an installed Lockstep that need one another, or a server on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from installed.stories import IN_WORKSPACE, JOB, SCRIPT
from installed.typed import WAIT_SECONDS, Ended, Installed, Line, Story
from support.hub_server import running_hub
from support.launched import wait_until

TINY = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}", "model.safetensors": (2).to_bytes(8, "little") + b"{}"}
FILES_OF_IMAGE = """
import hashlib, json, sys
from lockstep.platforms.clusters.imagebuild import context
from lockstep.plan.ship.imagebuild import Image
files = {image: context(image).items() for image in (Image.OPERATOR, Image.TRAINER)}
print(json.dumps({image: {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in items} for image, items in files.items()}))
"""


@pytest.fixture(autouse=True)
def beside_the_stories(ended: Callable[[Story, str], Ended]) -> None:
    """These are typed while the stories are."""


@pytest.fixture
def installed(environments: Mapping[str, Installed]) -> Installed:
    return environments["cli"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


def test_two_terminals_run_a_job_between_them(installed: Installed, here: Path, home: Path) -> None:
    for machine in ("one", "two"):
        (here / machine / "workspace").mkdir(parents=True)
        (here / machine / "workspace/hello.py").write_text(SCRIPT)
    (here / "job.yaml").write_text(JOB)
    place = f"127.0.0.1:{19000 + os.getpid() % 9 * 1400}"
    words = ["launch", "--at", place, "-f", "job.yaml", "--cluster", "./one", "--token-file", "token"]
    options = {"cwd": here, "env": installed.variables(home), "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(installed.command("lockstep", *words), **options) as launch:  # type: ignore[call-overload]
        try:
            wait_until(lambda: (here / "token").exists() or launch.poll() is not None, "no token was written")
            join = installed.type(Line(f"join {place} --cluster ./two", given=(here / "token").read_text()), here, home, {})
            output, errors = launch.communicate(timeout=WAIT_SECONDS)
        finally:
            launch.terminate()
    assert (launch.returncode, join.returncode) == (0, 0), output + errors + join.stdout + join.stderr
    assert "[rank 0] rank 0 of 2" in output and "Complete: all ranks are done" in output
    assert "rank 1 of 2" in join.stdout + output
    assert list(here.glob("two/workspace/runs/hello"))


def test_a_model_comes_by_its_name(installed: Installed, here: Path, home: Path) -> None:
    with running_hub() as hub:
        hub.add("org/tiny", TINY)
        variables = {"HF_ENDPOINT": hub.endpoint}
        line = Line("model get org/tiny --to models/tiny", files=("models/tiny/model.safetensors", "models/tiny/config.json"))
        line.check(installed.type(line, here, home, variables), here)
    assert not (here / IN_WORKSPACE).exists()


def test_images_are_built_from_the_same_files_as_in_a_checkout(installed: Installed, here: Path, home: Path) -> None:
    said = [
        subprocess.run([*python, "-c", FILES_OF_IMAGE], cwd=here, env=variables, capture_output=True, text=True, check=True).stdout
        for python, variables in ((installed.command("python"), installed.variables(home)), ([sys.executable], None))
    ]
    of_wheel, of_checkout = map(json.loads, said)
    assert of_wheel == of_checkout
    assert all("pyproject.toml" in files and len(files) > 100 for files in of_wheel.values())
