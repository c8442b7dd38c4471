"""Page docs/reference/tested.md: what ran for real is what can be run, and figures stand beside the stack that they were taken with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lanes import FOLDERS
from support.checkout import ROOT, script
from unit.project.test_docs import _wrong

ROWS: list[dict[str, Any]] = yaml.safe_load((ROOT / "docs/tested.yaml").read_text())["rows"]
MAKEFILE = (ROOT / "Makefile").read_text()
EACH_CHANGE = "each change"
H200 = next(row for row in ROWS if row["what"] == "One H200")

generate = script("scripts/generate.py")


def _exists(command: str) -> bool:
    if command.startswith("make "):
        return re.search(rf"^{command.removeprefix('make ')}:", MAKEFILE, re.MULTILINE) is not None
    if command.startswith("lockstep "):
        return _wrong(command.removeprefix("lockstep ")) is None
    return (ROOT / command).is_file() and Path(command).name.startswith("test_")


def _part_of_make_test(command: str) -> bool:
    """Whether `make test` runs it: one of its parts, or a file of theirs that isn't left out as a whole."""
    if command.startswith("make "):
        return command.removeprefix("make ") in FOLDERS
    left_out = re.search(r"^pytestmark = pytest\.mark\.(?:long|soak|corpus)", (ROOT / command).read_text(), re.MULTILINE)
    return left_out is None and any(command.startswith(folder) for folders in FOLDERS.values() for folder in folders)


def test_the_page_is_what_the_data_say() -> None:
    assert generate.differences(generate.tested()) == ""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["what"])
def test_a_row_that_ran_says_when_with_what_and_how_to_run_it_again(row: dict[str, Any]) -> None:
    ran = row["state"] != "never"
    assert row["state"] in generate.STATES
    assert {"when", "versions", "how"} <= set(row) if ran else set(row) == {"what", "state"}
    assert not ran or _exists(row["how"])
    assert row.get("when") != EACH_CHANGE or _part_of_make_test(row["how"])
    assert not ran or row["when"] == EACH_CHANGE or re.fullmatch(r"\d{4}-\d\d-\d\d", str(row["when"]))


@pytest.mark.parametrize("command", ["make none-such", "tests/unit/none_such.py", "tests/support/hub_server.py", "lockstep none-such"])
def test_a_command_that_is_not_there_is_noticed(command: str) -> None:
    assert not _exists(command)


@pytest.mark.parametrize("command", ["make test-gpu", "make soak", "tests/train/runs/test_gpu_suite.py"])
def test_what_make_test_leaves_out_is_no_test_of_each_change(command: str) -> None:
    assert not _part_of_make_test(command)


def test_packages_of_training_are_the_same_where_tests_and_ranks_run() -> None:
    texts = [(ROOT / f"requirements/{lock}.lock").read_text() for lock in ("dev", "train")]
    names = "|".join(("torch", "deepspeed", "transformers", "peft"))
    tested, shipped = (re.findall(rf"^(?:{names})==\S+", text, re.MULTILINE) for text in texts)
    assert len(tested) == 4
    assert tested == shipped


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_figures_of_a_gpu_name_the_torch_that_they_were_taken_with_and_the_tests_torch(page: str) -> None:
    text, locked = (ROOT / page).read_text(), generate.versions()["torch"]
    taken = re.findall(r"^torch (\d+\.\d+)", H200["versions"])[0]
    assert f"H200 with torch {taken}" in text
    assert f"torch {locked.rpartition('.')[0]}" in text
    assert "tested.md" in text


def test_the_stack_of_the_gpu_s_figures_is_the_table_s() -> None:
    taken = H200["versions"].partition(";")[0]
    assert f"Measured on {H200['when']} on one H200" in (ROOT / "docs/benchmarks.md").read_text()
    assert taken in (ROOT / "docs/benchmarks.md").read_text()
