"""The program that makes environments on hosts: what it takes, and what it refuses."""

from __future__ import annotations

import hashlib
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


def sent(capsys: pytest.CaptureFixture[str], request: dict[str, Any], body: bytes = b"") -> list[dict[str, Any]]:
    """Answers of the program to a request and what follows it."""
    install.main(io.BytesIO(json.dumps(request).encode() + b"\n" + body))
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def head(name: str, content: bytes, digest: str = "") -> bytes:
    return json.dumps({"name": name, "bytes": len(content), "sha256": digest or hashlib.sha256(content).hexdigest()}).encode() + b"\n"


def test_a_file_comes_whole_or_its_rest_comes_later(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = b"0123456789"
    request = {"do": "take", "files": 1, "bytes": len(content)}
    broken = sent(capsys, request, head("a-1.whl", content) + content[:4])
    assert broken == [{"offset": 0}, {"problem": "the connection ended before all of a-1.whl was here"}]
    assert not (data / "wheels/a-1.whl").exists()
    assert sent(capsys, request, head("a-1.whl", content) + content[4:]) == [{"offset": 4}, {"taken": "a-1.whl"}, {"done": True}]
    assert (data / "wheels/a-1.whl").read_bytes() == content


def test_a_file_with_another_digest_is_removed(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = sent(capsys, {"do": "take", "files": 1, "bytes": 3}, head("a-1.whl", b"abc", "0" * 64) + b"abc")
    assert hashlib.sha256(b"abc").hexdigest() in answers[-1]["problem"]
    assert "0" * 64 in answers[-1]["problem"]
    assert list((data / "wheels").iterdir()) == []


@pytest.mark.parametrize("name", ["../a.whl", "/etc/a", ".hidden", "a/b", "", "a" * 300])
def test_a_name_that_leads_elsewhere_is_refused(data: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    answers = sent(capsys, {"do": "take", "files": 1, "bytes": 3}, head(name, b"abc") + b"abc")
    assert "problem" in answers[-1]
    assert [path.name for path in data.rglob("*") if path.is_file()] == ["setup.lock"]


def test_more_than_the_disk_holds_is_refused_before_it_comes(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (answer,) = sent(capsys, {"do": "take", "files": 1, "bytes": 1 << 60})
    assert "MB free" in answer["problem"]


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
