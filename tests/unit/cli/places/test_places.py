"""The options that say where a verb acts: declared once, typed before a verb or after it, and refused where they mean nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer._completion_classes import BashComplete
from typer.testing import CliRunner

from lockstep.api.errors import ConfigError
from lockstep.cli import main as entry
from lockstep.cli.shared.jobargs import TargetOptions, acts_on
from lockstep.cli.shared.places import PLACES
from unit.cli.test_every_verb import VERBS, run


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `lockstep logs` gets, in place of a look at a job."""
    seen: list[Any] = []

    def find(name: str, where: TargetOptions) -> None:
        seen.append(where)
        raise ConfigError("seen")

    monkeypatch.setattr("lockstep.cli.jobs.logs.find_job", find)
    return seen


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("logs demo -n x", TargetOptions(namespace="x")),
        ("-n x logs demo", TargetOptions(namespace="x")),
        ("--namespace=x logs demo --cluster c", TargetOptions("c", "x")),
        ("-n x logs -n y demo", TargetOptions(namespace="y")),
        ("logs -fn x demo --context k", TargetOptions(namespace="x", context="k")),
        ("--local logs demo", TargetOptions(".lockstep/workspace")),
        ("--cluster run logs demo", TargetOptions("run")),
    ],
)
def test_an_option_may_stand_before_the_verb_or_after_it_and_the_last_one_counts(
    words: str, expected: TargetOptions, typed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (run(monkeypatch, words.split()), typed) == (2, [expected])


def test_what_follows_a_script_is_the_script_s(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("lockstep.cli.jobs.run.run_in_session", lambda words, job, where, detach: seen.append((words, where)) or 0)
    for words in (
        ["-n", "x", "run", "a.py", "-n", "5"],
        ["run", "-n", "x", "a.py", "-n", "5"],
        ["run", "-n", "x", "--", "a.py", "-n", "5"],
    ):
        assert run(monkeypatch, words) == 0
    assert seen == [(["a.py", "-n", "5"], TargetOptions(namespace="x"))] * 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sync --local", "sync takes no --local; lockstep sync --help shows what it takes"),
        ("-n x --local cluster list", "cluster list takes no -n, --local; lockstep cluster list --help shows what it takes"),
        ("get --local --cluster c", "--local is this machine, and --cluster c names another place: use one of them"),
        ("get --cluster no/such", "there is no no/such: name a cluster, its file (.yaml), or a folder of this machine that is there"),
        ("get --workspace w", "No such option: --workspace: --cluster ./FOLDER names a workspace of this machine"),
        ("plan -f job.yaml --cluster /usr", "/usr is a workspace of this machine, and this is about a cluster: name one by --cluster"),
        ("join 127.0.0.1:1 --cluster lab", "--cluster names this machine's folder for the job, and lab is none that is there"),
    ],
)  # fmt: skip
def test_a_place_that_a_verb_has_no_use_for_is_refused_in_one_sentence(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, words.split()) == 2
    assert capsys.readouterr().err == f"lockstep: {message}\n"


@pytest.mark.parametrize("name", [name for name, verb in VERBS.items() if verb.takes])
def test_help_ends_with_what_a_verb_takes(name: str) -> None:
    page = CliRunner().invoke(entry.app, [*name.split(), "--help"], env={"COLUMNS": "80"}).output.strip().splitlines()
    assert page[-1].strip() == f"Where: {', '.join(PLACES[place] for place in VERBS[name].takes)} (lockstep --help)"
    assert not {f"--{place}" for place in VERBS[name].takes} & set(" ".join(page[:-1]).replace("Example", "").split("│"))


def test_a_shell_completes_the_names_of_clusters_before_a_verb_and_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters/barcelona.yaml").touch()
    monkeypatch.chdir(tmp_path)
    complete = BashComplete(typer.main.get_command(entry.app), {}, "lockstep", "_LOCKSTEP_COMPLETE")
    for words in (["--cluster"], ["logs", "--cluster"], ["cluster", "status", "--cluster"]):
        assert [item.value for item in complete.get_completions(words, "bar")] == ["barcelona"]


def test_the_decorator_leaves_a_verb_s_own_parameters() -> None:
    @acts_on("namespace")
    def verb(where: TargetOptions, number: int = 3) -> tuple[TargetOptions, int]:
        return where, number

    context: Any = typer.Context(typer.main.get_command(entry.app))
    assert verb(context, number=4) == (TargetOptions(), 4)
    assert list(verb.__signature__.parameters) == ["context", "number"]  # type: ignore[attr-defined]
