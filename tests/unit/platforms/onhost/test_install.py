"""The program that makes environments on hosts: what it tells, and what it refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.platforms.onhost import install


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "data/lockstep"


def sent(capsys: pytest.CaptureFixture[str], request: dict[str, Any]) -> list[dict[str, Any]]:
    """Answers of the program to a request."""
    install.main(io.BytesIO(json.dumps(request).encode() + b"\n"))
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("name", ["env-../../x", "env-0", "bin", "env-" + "g" * 16])
def test_a_name_that_is_no_environment_s_is_refused(data: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (answer,) = sent(capsys, {"do": "make", "environment": name, "files": [], "folders": [], "keep": [], "linger": False})
    assert "is not an environment's name" in answer["problem"]


def test_facts_name_environments_that_are_complete_and_those_that_jobs_name(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"env-{digit * 16}" for digit in "0123"]
    for name in names[:3]:
        (data / name / "bin").mkdir(parents=True)
        (data / name / "bin/python").touch()
    (data / names[3]).mkdir()  # (its Python has gone)
    (data / f".{names[0]}.draft").mkdir()
    (data / "env").symlink_to(names[2])
    job = tmp_path / "state/lockstep/jobs/demo/run.json"
    job.parent.mkdir(parents=True)
    job.write_text(json.dumps({"command": [f"{data}/{names[1]}/bin/python", "-m", "lockstep_train"]}))
    (facts,) = sent(capsys, {"do": "facts", "folders": [str(tmp_path), str(tmp_path / "none")]})
    assert facts["environments"] == names[:3]
    assert facts["current"] == names[2]
    assert facts["used"] == [names[1]]
    assert facts["folders"] == [str(tmp_path)]
    assert facts["pythons"], "this very Python's base is one"


def test_an_environment_that_is_there_is_only_pointed_to_and_others_go(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, used, new = (f"env-{digit * 16}" for digit in "012")
    for name in (old, used, new):
        (data / name / "bin").mkdir(parents=True)
        (data / name / "bin/python").touch()
    (data / "env").symlink_to(old)
    unit = tmp_path / "config/systemd/user/lockstep-serve-demo.service"
    unit.parent.mkdir(parents=True)
    unit.write_text(f"ExecStart={data}/{used}/bin/python -m server\n")
    request = {"do": "make", "environment": new, "files": [], "folders": [str(tmp_path / "workspace")], "keep": [], "linger": False}
    (answer,) = sent(capsys, request)
    assert answer["done"] is True
    assert (data / "env").readlink() == Path(new)
    assert sorted(path.name for path in data.glob("*env-*")) == [used, new]
    assert (tmp_path / "workspace").is_dir()
