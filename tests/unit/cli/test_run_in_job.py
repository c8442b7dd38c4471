"""`lockstep run --job`: what is typed in the pod, what is refused before, and what stands in the way."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.api.errors import ConfigError, Failed
from lockstep.cli.main import main
from lockstep.platforms.jobs import terminal
from lockstep.platforms.kubernetes.job import KubernetesJob
from lockstep.programs import STDERR, STDOUT, Broken
from support.process_place import ProcessPlace


def job(kind: str = "Interactive", **conditions: tuple[str, str, str]) -> Any:
    listed = [{"type": name, "status": s, "reason": r, "message": m} for name, (s, r, m) in conditions.items()]
    status = {"conditions": listed}
    return SimpleNamespace(name="dev", namespace="ns", at="dev -n ns", status=status, job={"spec": {"type": kind}, "status": status})


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (job("Batch"), "job dev is a Batch job"),
        (job(Failed=("True", "StartTimeout", "node 0 did not start")), "node 0 did not start: lockstep retry dev -n ns"),
        (job(Suspended=("True", "Idle", "")), "lockstep resume dev -n ns"),
        (job(Suspended=("False", "Stopping", "")), "lockstep resume dev -n ns"),
        (job(Progressing=("False", "Unschedulable", "no node fits")), "no node fits: lockstep why dev -n ns"),
    ],
)
def test_where_nothing_can_run_it_says_what_to_do(found: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        KubernetesJob.refuse_idle(found)


@pytest.mark.parametrize("reason", ["Ready", "Running", "Starting"])
def test_a_run_that_has_to_wait_is_asked_for_all_the_same(reason: str) -> None:
    KubernetesJob.refuse_idle(job(Progressing=("True", reason, ""), Suspended=("False", "NotSuspended", "")))


def test_the_script_s_words_are_no_options_of_ours_and_no_shell_reads_them() -> None:
    words = ["a.py", "--detach", "two words", "$(id)"]
    command = terminal.agent_command(words, "ada@laptop", detach=False)
    assert command == ["python3", "-I", "/lockstep/agent.pyz", "run", "--by", "ada@laptop", "--until-eof", "--", *words]
    assert "--until-eof" not in terminal.agent_command(words, "ada@laptop", detach=True)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["train.py", "--epochs", "3"], "train.py"),
        (["./sub/train.py"], "sub/train.py"),
        (["gone.py"], None),
        (["sub"], None),
        (["-m", "train"], None),
        (["/workspace/train.py"], None),
        ([], None),
    ],
)
def test_only_a_file_of_that_relative_path_is_taken_for_the_script(words: list[str], name: str | None, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for file in ("train.py", "sub/train.py"):
        (tmp_path / file).write_text("print(1)\n")
    digest = "" if name is None else hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    assert terminal.digest_here(words, tmp_path) == digest


@pytest.mark.parametrize(("there", "differs"), [("print(1)\n", False), ("print(2)\n", True), (None, False)])
def test_a_copy_that_differs_is_found_and_one_that_is_missing_is_left_to_the_run(there: str | None, differs: bool, tmp_path: Path) -> None:
    here, copy = tmp_path / "train.py", tmp_path / "copy.py"
    here.write_text("print(1)\n")
    if there is not None:
        copy.write_text(there)
    digest = terminal.digest_here(["train.py"], tmp_path)
    assert asyncio.run(terminal.differs_there(ProcessPlace(), digest, str(copy))) is differs


class Played:
    """A program in a pod: what it prints, and its exit code."""

    def __init__(self, *frames: tuple[int, bytes], code: int | None = 0) -> None:
        self.place, self.code, self._frames = SimpleNamespace(name="pod dev-0"), code, frames

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        for frame in self._frames:
            yield frame
        if self.code is None:
            raise Broken(f"the connection to {self.place.name} broke")


def run(played: Played) -> int:
    @asynccontextmanager
    async def program(command: Any) -> AsyncIterator[Any]:
        yield played

    place: Any = SimpleNamespace(program=program)
    return asyncio.run(terminal.run_on_all_nodes(place, ["python3"]))


def test_output_and_exit_code_are_passed_on(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert run(Played((STDOUT, b"[rank 0] x\n"), (STDERR, b"[lockstep] y\n"), code=7)) == 7
    assert capfdbinary.readouterr() == (b"[rank 0] x\n", b"[lockstep] y\n")


def test_a_connection_that_breaks_is_said() -> None:
    with pytest.raises(Failed, match=r"^the connection to pod dev-0 broke, and the run was stopped with it$"):
        run(Played(code=None))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name what to run"),
        (["--local"], "--local is for a job file: name one with -f, or a program behind --"),
        (["-f", "job.yaml", "a.py"], "use one of them"),
        (["--local", "-f", "manifests/samples/dev-environment.yaml"], "needs the operator"),
    ],
)
def test_what_does_not_go_together_is_refused(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["lockstep", "run", *arguments])
    assert main() == 2
    assert words in capsys.readouterr().err
