"""Verbs that run a module of the trainer in a process of its own."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from lockstep.api.errors import ConfigError
from lockstep.cli import main as entry
from lockstep.cli.files import adapter, checkpoint
from lockstep.cli.shared import terminal, trainer
from lockstep.cli.shared.jobargs import TargetOptions
from lockstep.cli.shared.trainer import _run
from lockstep.kube.exec import PodPlace
from lockstep.platforms.clusters.target import Target
from lockstep.platforms.kubernetes.backend import KubernetesBackend
from lockstep.platforms.kubernetes.job import KubernetesJob
from lockstep.platforms.output import ProgramOutput
from lockstep.platforms.places.values import Volume
from lockstep.programs import ProgramFailed
from lockstep_spec.files import make_directory
from lockstep_train import inspect
from support.in_process import lockstep

CALLER = """
import sys
from lockstep.cli.shared import trainer
trainer.trainer_command = lambda module, arguments: [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(1000)"]
try:
    trainer.run_trainer("proof", [])
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_ctrl_c_ends_the_process_without_its_traceback() -> None:
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert caller.stdout.readline() == "here\n"
    os.killpg(caller.pid, signal.SIGINT)
    _, said = caller.communicate(timeout=60)  # until both have closed the pipes
    assert (caller.returncode, said) == (130, "")


@pytest.mark.parametrize("options", [[], ["--verify"]])
def test_what_is_known_of_checkpoints_is_printed_as_the_trainer_says_it(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "ask_trainer", lambda module, arguments: ('{"commits": 1}', 0))
    done = CliRunner().invoke(entry.app, ["checkpoint", "runs/x", *options, "-o", "json"])
    assert (done.exit_code, done.output) == (0, '{"commits": 1}\n')


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], bool]]:
    """Modules of the trainer that `lockstep adapter` runs, with their arguments, and whether their first is there."""
    calls: list[tuple[str, list[str], bool]] = []

    async def get(job: str, output: Path) -> str:
        make_directory(output)
        return ""

    def run(module: str, words: list[str | Path]) -> None:
        calls.append((module, list(map(str, words)), Path(words[0]).is_dir()))

    monkeypatch.setattr(adapter, "_get", get)
    monkeypatch.setattr(adapter, "find_job", lambda job, where: job)
    monkeypatch.setattr(adapter, "ask_trainer", lambda module, arguments: ("README.md  482 B\n", 0))
    monkeypatch.setattr(adapter, "run_trainer", run)
    return calls


def test_an_adapter_is_sent_only_after_its_files_were_shown_and_somebody_has_said_yes(
    typed: list[tuple[str, list[str], bool]], tmp_path: Path
) -> None:
    refused = CliRunner().invoke(entry.app, ["adapter", "push", str(tmp_path), "org/name"])
    assert isinstance(refused.exception, ConfigError) and "use --yes to send them" in str(refused.exception)
    assert (refused.stdout, typed) == ("README.md  482 B\n", [])
    assert CliRunner().invoke(entry.app, ["adapter", "push", str(tmp_path), "org/name", "--public", "--yes"]).exit_code == 0
    assert typed == [("push", [str(tmp_path), "org/name", "--public", "--send"], True)]


@pytest.mark.parametrize("words", [["push", "demo", "org/name", "--yes"], ["merge", "demo", "--output", "out", "--base", "base"]])
def test_a_job_s_adapter_is_fetched_for_a_while(
    words: list[str], typed: list[tuple[str, list[str], bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(entry.app, ["adapter", *words]).exit_code == 0
    ((module, arguments, was_there),) = typed
    assert module == words[0] and was_there
    assert not Path(arguments[0]).exists()


def test_a_job_is_not_merged_into_a_folder_that_holds_something(typed: list[tuple[str, list[str], bool]], tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    refused = CliRunner().invoke(entry.app, ["adapter", "merge", "demo", "--output", str(tmp_path)]).exception
    assert isinstance(refused, ConfigError) and "is not empty; give a new folder" in str(refused)


def test_what_the_trainer_says_of_a_folder_acts_on_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Folders may come from pods. Both streams at once, more than a pipe holds, and the exit code."""
    program = "import sys; [print('\x1b[2J\u202e' * 9, file=f) for _ in range(20000) for f in (sys.stdout, sys.stderr)]; sys.exit(3)"
    assert _run([sys.executable, "-X", "utf8", "-c", program], ProgramOutput().put) == 3
    told = capsys.readouterr()
    assert told.out == told.err == ("\\x1b[2J\\u202e" * 9 + "\n") * 20000


SLOW = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\nprint('first', flush=True); time.sleep(0.5)"


def test_what_says_nothing_for_long_is_said_to_go_on_until_its_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = tmp_path / "told"
    monkeypatch.setattr(trainer, "trainer_command", lambda module, arguments: [sys.executable, "-c", SLOW, str(told)])
    monkeypatch.setattr(terminal, "ELSEWHERE_SECONDS", 0.1)
    seen: list[str] = []

    def tell(line: str) -> None:
        seen.append(line)
        told.touch()

    monkeypatch.setattr(terminal, "tell", tell)
    monkeypatch.setattr(ProgramOutput, "put", lambda self, data: seen.append(data.decode()) if data else None)
    trainer.run_trainer("merge", [])
    waited = [line for line in seen if line.startswith("… importing torch and peft, ")]
    assert waited and waited == seen[: len(waited)], "none after the first line"
    assert "".join(seen[len(waited) :]) == "first\n"
    assert capsys.readouterr().err == ""


def test_every_verb_of_the_trainer_says_what_it_is_at_first() -> None:
    assert trainer.AT_FIRST.keys() == trainer.NEEDS.keys()


def test_nothing_of_the_trainer_imports_peft_with_what_peft_imports_beside() -> None:
    """bitsandbytes, which costs seconds and says on CPUs that it can't load a kernel which nobody uses."""
    root = Path(trainer.__file__).resolve().parents[3] / "workspace/lockstep_train"
    direct = [
        f"{path.name}:{node.lineno}"
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import) and any(alias.name in ("peft", "bitsandbytes") for alias in node.names)
    ]
    assert direct == []


class Pod:
    """A program in a pod that prints `answer` and ends with `code`."""

    def __init__(self, answer: str, code: int | None) -> None:
        self.pieces, self.code, self.command = [answer.encode(), b""], code, [""]

    async def read(self) -> bytes:
        return self.pieces.pop(0)

    def failure(self) -> ProgramFailed:
        return ProgramFailed("pod x-0: /workspace/runs/x holds no commit")

    def places(self, monkeypatch: pytest.MonkeyPatch, nodes: list[int]) -> None:
        @asynccontextmanager
        async def program(place: Any, command: list[str], **_: Any) -> AsyncIterator[Pod]:
            self.command = command
            yield self

        @asynccontextmanager
        async def volume(job: KubernetesJob, node: int, *_: object) -> AsyncIterator[Volume]:
            yield Volume(PodPlace(cast(Any, None), job.namespace, f"{job.name}-{node}", "trainer"), "/workspace", "/datasets")

        monkeypatch.setattr(PodPlace, "program", program)
        monkeypatch.setattr(KubernetesJob, "volume", volume)
        monkeypatch.setattr(KubernetesJob, "nodes_with_volumes", lambda job: nodes)

    def asked(self, verb: str, *options: str) -> tuple[str, int]:
        backend = KubernetesBackend(Target(cast(Any, None), "team", "local"))
        job = KubernetesJob(Target(cast(Any, None), "team", "local"), {"metadata": {"name": "x", "namespace": "team"}}, backend)
        return asyncio.run(job.commits(verb, options, print))


def test_a_job_s_commits_are_read_where_its_volume_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = Pod('{"commits": []}', 0)
    pod.places(monkeypatch, [0])
    assert pod.asked("verify", "--all") == ('{"commits": []}', 0)
    assert pod.command == ["python3", "-m", "lockstep_train.inspect", "verify", "/workspace/runs/x", "--all"]


@pytest.mark.parametrize(
    ("answer", "code", "raised"),
    [("", 78, ConfigError), ("", 1, ProgramFailed), ('{"a": 1}', None, ProgramFailed), ('{"a": 1}', 137, ProgramFailed)],
)
def test_what_is_no_answer_is_no_verdict(answer: str, code: int | None, raised: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    pod = Pod(answer, code)
    pod.places(monkeypatch, [0])
    with pytest.raises(raised):
        pod.asked("list")


def test_damage_is_an_answer_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = Pod('{"whole": false}', 1)
    pod.places(monkeypatch, [0])
    assert pod.asked("verify") == ('{"whole": false}', 1)


def test_shards_on_several_volumes_are_not_judged_by_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = Pod("{}", 0)
    pod.places(monkeypatch, [0, 1])
    with pytest.raises(ConfigError, match="lockstep cp x:runs/x/checkpoints node-N --node N -n team, N from 0 to 1"):
        pod.asked("list")


def test_a_word_is_a_job_unless_it_is_a_folder_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    asked: list[Any] = []

    def find(job: str, where: TargetOptions) -> Any:
        async def commits(verb: str, options: Any, say: object) -> tuple[str, int]:
            asked.append((verb, job, where, list(options)))
            return '{"commits": [], "problems": []}', 0

        return SimpleNamespace(commits=commits)

    monkeypatch.setattr(checkpoint, "find_job", find)
    monkeypatch.setattr(checkpoint, "ask_trainer", lambda module, arguments: ('{"commits": [], "problems": []}', 0))
    for sources in (["here"], ["./nowhere"], ["/etc"], ["runs/demo"]):
        empty = CliRunner().invoke(entry.app, ["checkpoint", *sources])
        assert (empty.exit_code, empty.stdout) == (0, "no commit is there; what a script saves by itself isn't listed\n")
    assert asked == []
    assert CliRunner().invoke(entry.app, ["checkpoint", "demo", "--verify", "--all", "-n", "team", "--cluster", "local"]).exit_code == 0
    assert asked == [("verify", "demo", TargetOptions("local", "team", None), ["--all"])]
    refused = CliRunner().invoke(entry.app, ["checkpoint", "demo", "here"]).exception
    assert isinstance(refused, ConfigError) and "demo is not a folder of this machine" in str(refused)
    refused = CliRunner().invoke(entry.app, ["checkpoint", "here", "--all"]).exception
    assert isinstance(refused, ConfigError) and "--all needs --verify" in str(refused)


@pytest.mark.parametrize("verb", ["list", "verify"])
def test_a_folder_that_is_no_run_s_is_refused(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "some").mkdir()
    assert inspect.main([verb, str(tmp_path)]) == 78
    assert f"{tmp_path} is not a run's folder" in capsys.readouterr().err


def test_a_run_that_has_not_saved_yet_has_an_empty_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gang").mkdir()
    assert inspect.main(["list", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["commits"] == []


JOB = """apiVersion: lockstep.dev/v1alpha1
kind: TrainingJob
metadata: {name: j}
spec: {nodes: 1, script: {path: nosuch.py}}
"""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("run --local -f nosuch.yaml", "nosuch.yaml: can't be read"),
        ("run --local -f job.yaml", "spec.script.path: there is no"),
        ("run --local -f job.yaml --set script.folder=/nosuch", "spec.script.folder: there is no"),
        ("run --local --detach -f job.yaml", "leave out --local"),
        ("run --local", "is for a job file"),
        ("launch --at 127.0.0.1:29600 -f nosuch.yaml", "nosuch.yaml: can't be read"),
        ("join 127.0.0.1:29600 --token-file nosuch", "nosuch"),
        ("bench scaling --local -f nosuch.yaml", "nosuch.yaml: can't be read"),
        ("retry --local -f nosuch.yaml", "nosuch.yaml: can't be read"),
        ("retry --local -f job.yaml", "no run j can be read"),
        ("adapter export nosuch -o out", "there is no nosuch on this machine"),
        ("adapter merge . -o out --base nosuch", "there is no nosuch on this machine"),
        ("adapter merge ./nosuch -o out", "there is no nosuch on this machine"),
        ("adapter push ./nosuch org/name", "there is no nosuch on this machine"),
        ("checkpoint ./nosuch", "there is no nosuch on this machine"),
    ],
)
def test_nothing_is_fetched_for_a_file_that_is_not_there(words: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)
    monkeypatch.setattr("lockstep.platforms.local.environment.importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda _: None)))
    monkeypatch.setattr("lockstep.environments.full_environment", lambda _: pytest.fail("the environment is made"))
    done = lockstep(*words.split())
    assert done.returncode == 2 and says in done.stderr, done.stderr
