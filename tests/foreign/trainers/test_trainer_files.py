"""Configurations and command lines of other trainers, of the kinds in files.yaml: which job each is, or why it is none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.api.errors import ConfigError
from lockstep.api.files.jobfile import parse_job_file
from lockstep.plan.translate.trainer import Size, job_text

CASES = yaml.safe_load((Path(__file__).parent / "files.yaml").read_text(encoding="utf-8"))
RANKS = 4
ABSENT = object()
DEFAULTS = (("format", "Auto"), ("weight", "1"))
"""Fields of a source that no file states."""


def value_at(job: dict[str, Any], path: str) -> Any:
    """Return a field below spec.training, or below spec."""
    place: Any = job["spec"]["training"] | {key: value for key, value in job["spec"].items() if key != "training"}
    for part in path.split("."):
        place = place.get(part, ABSENT) if isinstance(place, dict) else ABSENT
    if path == "data.sources":
        return [{key: text for key, text in source.items() if (key, text) not in DEFAULTS} for source in place]
    return place


def translated(case: dict[str, Any]) -> Any:
    return job_text(case["file"], "config.yaml", "x", None, Size(RANKS), case.get("beside", {}).get)


@pytest.mark.parametrize("case", [case for case in CASES if "job" in case], ids=lambda case: case["kind"])
def test_a_training_that_lockstep_has_becomes_the_same_training(case: dict[str, Any]) -> None:
    translation = translated(case)
    job = parse_job_file(translation.text, "x.yaml").to_dict()
    fields = {path: value_at(job, path) for path in case["job"]}
    assert {path: value if isinstance(value, list | dict | bool) else str(value) for path, value in fields.items()} == {
        path: value if isinstance(value, list | dict | bool) else str(value) for path, value in case["job"].items()
    }
    assert [path for path in case.get("absent", ()) if value_at(job, path) not in (ABSENT, None)] == []
    head = " ".join(line.removeprefix("# ") for line in translation.text.partition("\n\n")[0].splitlines())
    assert [words for words in case.get("said", ()) if words not in head] == []
    listed = [one.what.partition(":")[0] for one in translation.leftovers]
    assert [key for key in case.get("left", ()) if listed.count(key) != 1] == []
    assert [key for key in case.get("unlisted", ()) if key in listed] == []


@pytest.mark.parametrize("case", [case for case in CASES if "refused" in case], ids=lambda case: case["kind"])
def test_another_training_is_refused_by_its_name_and_line(case: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        translated(case)
    place = f"config.yaml:{case['line']}: " if "line" in case else "config.yaml:"
    assert [bool(re.search(case["refused"], line)) and line.startswith(place) for line in map(str, refused.value.args)] == [True], (
        refused.value
    )


def test_each_tool_has_cases() -> None:
    assert len({case["kind"] for case in CASES}) == len(CASES), "each kind once"
