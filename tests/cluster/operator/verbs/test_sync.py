"""`lockstep sync` to real pods: shared volumes, a volume a pod, and pods that can't take it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep.cli.main import main
from support.clusters.cluster_jobs import Jobs

Kubectl = Callable[..., subprocess.CompletedProcess[str]]


def sync(monkeypatch: pytest.MonkeyPatch, jobs: Jobs, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["lockstep", "sync", *arguments, "-n", jobs.namespace])
    try:
        return main()
    except SystemExit as ended:
        return int(ended.code or 0)


def read(kubectl: Kubectl, jobs: Jobs, pod: str, path: str) -> str:
    return kubectl("exec", "-n", jobs.namespace, pod, "-c", "trainer", "--", "cat", path).stdout


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "code" / "pkg").mkdir(parents=True)
    for number in range(20):
        (tmp_path / "code" / "pkg" / f"m{number}.py").write_text(f"{number}\n")
    return tmp_path / "code"


def test_pods_that_share_their_volume_get_it_once_and_those_that_do_not_each(
    jobs: Jobs, source: Path, tmp_path: Path, kubectl: Kubectl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs.start("shared")
    jobs.start("own", storage={"mode": "PerPod"})
    jobs.until_running("shared")
    assert sync(monkeypatch, jobs, "shared", str(source)) == 0
    assert "shared-0: 20 sent" in capsys.readouterr().out
    assert read(kubectl, jobs, "shared-1", "/workspace/pkg/m7.py") == "7\n"
    (source / "pkg" / "m7.py").write_text("seven\n")
    (source / "pkg" / "m8.py").unlink()
    assert sync(monkeypatch, jobs, "shared", str(source)) == 0
    assert "shared-0: 1 sent" in (told := capsys.readouterr().out) and "1 removed" in told
    assert read(kubectl, jobs, "shared-1", "/workspace/pkg/m7.py") == "seven\n"

    jobs.until_running("own")
    assert sync(monkeypatch, jobs, "own", str(source)) == 0
    assert {line.partition(":")[0] for line in capsys.readouterr().out.splitlines()} == {"own-0", "own-1"}
    assert [read(kubectl, jobs, f"own-{node}", "/workspace/pkg/m7.py") for node in (0, 1)] == ["seven\n", "seven\n"]
    other = tmp_path / "other"
    (other / "pkg").mkdir(parents=True)
    (other / "pkg" / "m7.py").write_text("another seven\n")
    for name, *where in (("shared",), ("own",), ("shared", "--to", "/workspace/pkg")):
        folder = other / "pkg" if where else other
        assert sync(monkeypatch, jobs, name, str(folder), *where) == 2
        told = capsys.readouterr().err
        assert f"m7.py in {where[-1] if where else '/workspace'} was sent from" in told and f"{source}, and would be another file" in told
        assert re.search(
            rf"lockstep sync {name} {folder} --to /workspace/{folder.name}{'-[0-9a-f]{6}' if where else ''} -n {jobs.namespace}", told
        )
    monkeypatch.setattr("sys.argv", ["lockstep", "cp", str(other / "pkg/m7.py"), "own:/workspace/pkg/m7.py", "-n", jobs.namespace])
    with suppress(SystemExit):
        main()
    assert capsys.readouterr().err.count("was sent from") == 2
    pods = ("shared-0", "own-0", "own-1")
    assert {read(kubectl, jobs, pod, "/workspace/pkg/m7.py") for pod in pods} == {"seven\n"}, "nothing was written"
    assert sync(monkeypatch, jobs, "shared", str(other), "--to", "/workspace/other") == 0
    jobs.end("own")
    capsys.readouterr()

    assert sync(monkeypatch, jobs, "shared", str(source), "--to", "/nowhere") == 1
    assert "shared-0: not sent: " in (told := capsys.readouterr().out) and "/nowhere" in told
    jobs.change("shared", suspend=True)
    jobs.until_condition("shared", "Suspended", "True", "Suspended")
    assert sync(monkeypatch, jobs, "shared", str(source)) == 2
    assert "no pod of job shared runs" in capsys.readouterr().err
    jobs.end("shared")
