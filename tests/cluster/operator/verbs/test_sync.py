"""`lockstep sync` to real pods: shared volumes, a volume a pod, and pods that can't take it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from support.clusters.cluster_jobs import Jobs
from support.in_process import lockstep

Kubectl = Callable[..., subprocess.CompletedProcess[str]]


def sync(jobs: Jobs, *arguments: str) -> tuple[int, str]:
    """Exit code and output; errors, if there is none."""
    done = lockstep("sync", *arguments, "-n", jobs.namespace)
    return done.returncode, done.stdout or done.stderr


def read(kubectl: Kubectl, jobs: Jobs, pod: str, path: str) -> str:
    return kubectl("exec", "-n", jobs.namespace, pod, "-c", "trainer", "--", "cat", path).stdout


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "code" / "pkg").mkdir(parents=True)
    for number in range(20):
        (tmp_path / "code" / "pkg" / f"m{number}.py").write_text(f"{number}\n")
    return tmp_path / "code"


def test_pods_that_share_their_volume_get_it_once_and_those_that_do_not_each(
    jobs: Jobs, source: Path, tmp_path: Path, kubectl: Kubectl
) -> None:
    jobs.start("shared")
    jobs.start("own", storage={"mode": "PerPod"})
    jobs.until_running("shared")
    code, told = sync(jobs, "shared", str(source))
    assert code == 0 and "shared-0: 20 sent" in told
    assert read(kubectl, jobs, "shared-1", "/workspace/pkg/m7.py") == "7\n"
    (source / "pkg" / "m7.py").write_text("seven\n")
    (source / "pkg" / "m8.py").unlink()
    code, told = sync(jobs, "shared", str(source))
    assert code == 0 and "shared-0: 1 sent" in told and "1 removed" in told
    assert read(kubectl, jobs, "shared-1", "/workspace/pkg/m7.py") == "seven\n"

    jobs.until_running("own")
    code, told = sync(jobs, "own", str(source))
    assert code == 0 and {line.partition(":")[0] for line in told.splitlines()} == {"own-0", "own-1"}
    assert [read(kubectl, jobs, f"own-{node}", "/workspace/pkg/m7.py") for node in (0, 1)] == ["seven\n", "seven\n"]
    other = tmp_path / "other"
    (other / "pkg").mkdir(parents=True)
    (other / "pkg" / "m7.py").write_text("another seven\n")
    for name, *where in (("shared",), ("own",), ("shared", "--to", "/workspace/pkg")):
        folder = other / "pkg" if where else other
        code, told = sync(jobs, name, str(folder), *where)
        assert code == 2
        assert f"m7.py in {where[-1] if where else '/workspace'} was sent from" in told and f"{source}, and would be another file" in told
        assert re.search(
            rf"lockstep sync {name} {folder} --to /workspace/{folder.name}{'-[0-9a-f]{6}' if where else ''} -n {jobs.namespace}", told
        )
    copied = lockstep("cp", str(other / "pkg/m7.py"), "own:/workspace/pkg/m7.py", "-n", jobs.namespace)
    assert copied.stderr.count("was sent from") == 2
    pods = ("shared-0", "own-0", "own-1")
    assert {read(kubectl, jobs, pod, "/workspace/pkg/m7.py") for pod in pods} == {"seven\n"}, "nothing was written"
    assert sync(jobs, "shared", str(other), "--to", "/workspace/other")[0] == 0
    jobs.end("own")

    code, told = sync(jobs, "shared", str(source), "--to", "/nowhere")
    assert code == 1 and "shared-0: not sent: " in told and "/nowhere" in told
    jobs.change("shared", suspend=True)
    jobs.until_condition("shared", "Suspended", "True", "Suspended")
    code, told = sync(jobs, "shared", str(source))
    assert code == 2 and "no pod of job shared runs" in told
    jobs.end("shared")
