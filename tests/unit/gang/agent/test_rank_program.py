"""The program of a rank: its arguments, which scripts get --local_rank, and what is said of one that can't run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep_gang.agent.ranks.environment import RankPlace, rank_environment
from lockstep_gang.agent.ranks.ranks import LocalNode, RankProcess
from lockstep_gang.agent.ranks.script import argv, local_rank_option, program_problem, with_local_rank
from lockstep_gang.contract.interactive import Asked
from lockstep_gang.contract.messages import Start
from lockstep_gang.contract.placewords import ON_HOSTS
from lockstep_gang.contract.run import HostPlace, RestartPolicy, Run
from lockstep_gang.lifecycle.causes import remedy
from unit.gang.cases import Gang, make_run

PARSER = "import argparse\nparser = argparse.ArgumentParser()\n"
UNDERSCORE, DASH, NONE = "--local_rank", "--local-rank", ""
TAKEN: list[tuple[str, str]] = [
    # argparse
    (PARSER + "parser.add_argument('--local_rank', type=int, default=-1)", UNDERSCORE),
    (PARSER + 'parser.add_argument("--local_rank", type=int, required=True)', UNDERSCORE),
    (PARSER + "parser.add_argument(\n    '--local_rank',\n    type=int,\n)", UNDERSCORE),
    (PARSER + "parser.add_argument('--local-rank', type=int)", DASH),
    (PARSER + "parser.add_argument('--local_rank', '--local-rank', type=int)", UNDERSCORE),
    (PARSER + "parser.add_argument('--local-rank', '--local_rank', type=int)", UNDERSCORE),
    (PARSER + "parser.add_argument('-r', '--local_rank', dest='rank')", UNDERSCORE),
    (PARSER + "group = parser.add_argument_group('x')\ngroup.add_argument('--local_rank', default=0)", UNDERSCORE),
    (PARSER + "import os\nparser.add_argument('--local_rank', default=os.environ.get('LOCAL_RANK', 0))", UNDERSCORE),
    ("def main():\n    if True:\n        p.add_argument('--local_rank')\nif __name__ == '__main__': main()", UNDERSCORE),
    # others
    ("import optparse\np = optparse.OptionParser()\np.add_option('--local_rank', type='int')", UNDERSCORE),
    ("import click\n@click.command()\n@click.option('--local_rank', default=0)\ndef main(local_rank): pass", UNDERSCORE),
    ("import click\n@click.command()\n@click.option('--local-rank', '-r', type=click.INT)\ndef main(local_rank): pass", DASH),
    ("import typer\ndef main(rank: int = typer.Option(0, '--local_rank')): pass", UNDERSCORE),
    ("from absl import flags\nflags.DEFINE_integer('local_rank', 0, 'by the launcher')", UNDERSCORE),
    ("from absl import flags\nflags.DEFINE_enum('mode', 'local_rank', [], '')", NONE),
    # who reads the variable, or only speaks of it
    ("import os\nlocal_rank = int(os.environ['LOCAL_RANK'])", NONE),
    ("import os\nlocal_rank = int(os.environ['LOCAL_RANK'])\n" + PARSER + "args = parser.parse_args()", NONE),
    ("import os\nargs.local_rank = int(os.getenv('LOCAL_RANK', -1))", NONE),
    (PARSER + "# parser.add_argument('--local_rank', type=int)", NONE),
    ('"""Start it with parser.add_argument("--local_rank")."""', NONE),
    (PARSER + "parser.add_argument('--seed', help='not --local_rank')", NONE),
    (PARSER + "parser.add_argument('--local_ranks', type=int)", NONE),
    ("command = ['train.py', '--local_rank', '0']", NONE),
    ("cmd.append('--local_rank=0')", NONE),
    ("import deepspeed\n" + PARSER + "deepspeed.add_config_arguments(parser)\nargs = parser.parse_args()\nlocal_rank = 0", NONE),
    ("from transformers import HfArgumentParser, TrainingArguments\nprint(training_args.local_rank)", NONE),
    ("import fire\ndef main(local_rank=0): pass\nfire.Fire(main)", NONE),
    ("import hydra\n@hydra.main()\ndef main(config): print(config.local_rank)", NONE),
    ("from dataclasses import dataclass\n@dataclass\nclass A:\n    local_rank: int = 0", NONE),
    ("print('no rank at all')", NONE),
    ("local_rank = 'no Python", NONE),
    ("", NONE),
    # of a file beside it that it imports
    ("from parts import parser_of\nprint(parser_of().parse_args().local_rank)", UNDERSCORE),
    ("import parts\nprint(parts.parser_of().parse_args().local_rank)", UNDERSCORE),
    ("from package import options\nprint(options.parse().local_rank)", DASH),
    ("from package.options import parse\nprint(parse().local_rank)", DASH),
    ("import parts\nprint('asks for no rank')", NONE),
    ("import absent\nprint(absent.local_rank)", NONE),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "parts.py").write_text("def parser_of():\n    p.add_argument('--local_rank', type=int)\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/options.py").write_text("def parse():\n    p.add_argument('--local-rank', type=int)\n")
    return tmp_path


def test_only_a_script_that_takes_the_option_gets_its_local_rank(folder: Path) -> None:
    answers = []
    for text, _ in TAKEN:
        (folder / "train.py").write_text(text)
        answers.append((text, local_rank_option(("python3", "train.py"), str(folder), {}, None)))
    assert answers == TAKEN


@pytest.mark.parametrize(
    ("command", "stated", "expected"),
    [
        (("python3", "takes.py", "-x"), None, ("python3", "takes.py", "--local_rank=3", "-x")),
        (("python3", "takes.py"), False, ("python3", "takes.py")),
        (("python3", "plain.py", "-x"), None, ("python3", "plain.py", "-x")),
        (("python3", "plain.py", "-x"), True, ("python3", "plain.py", "--local_rank=3", "-x")),
        (("python3", "takes.py", "--local_rank", "0"), None, ("python3", "takes.py", "--local_rank", "0")),
        (("python3", "takes.py", "--local-rank=0"), True, ("python3", "takes.py", "--local-rank=0")),
        (("python3", "-m", "package.main", "-x"), None, ("python3", "-m", "package.main", "--local-rank=3", "-x")),
        (("python3", "-m", "takes"), None, ("python3", "-m", "takes", "--local_rank=3")),
        (("python3", "-m", "package"), None, ("python3", "-m", "package", "--local_rank=3")),
        (("python3", "-m", "elsewhere"), None, ("python3", "-m", "elsewhere", "--local_rank=3")),
        (("python3", "-m", "installed.main"), None, ("python3", "-m", "installed.main")),
        (("python3", "-m", "installed.main"), True, ("python3", "-m", "installed.main", "--local_rank=3")),
        (("bash", "takes.py"), False, ("bash", "takes.py")),
    ],
)
def test_the_option_is_right_behind_the_script_or_module(
    command: tuple[str, ...], stated: bool | None, expected: tuple[str, ...], folder: Path
) -> None:
    takes = "p.add_argument('--local_rank')"
    for path in ("takes.py", "package/__main__.py", "more/elsewhere.py"):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(takes)
    (folder / "package/main.py").write_text("from .options import parse\nprint(parse().local_rank)")
    (folder / "plain.py").write_text("")
    option = local_rank_option(command, str(folder), {"PYTHONPATH": f"/nowhere:{folder}/more"}, stated)
    assert with_local_rank(command, option, 3) == expected


@pytest.mark.parametrize(
    ("command", "expected"),
    [(("a.py", "-x"), UNDERSCORE), (("-m", "a"), UNDERSCORE), (("./a.py.sh",), NONE), (("python3", "a.py"), NONE)],
)
def test_what_is_asked_for_in_a_dev_environment_is_decided_by_the_same_text(command: tuple[str, ...], expected: str, folder: Path) -> None:
    (folder / "a.py").write_text("p.add_argument('--local_rank')")
    node = LocalNode(make_run(local_rank=True), 0, "run.json", folder / "report.sock", folder)
    start = Start(1, 0, "10.0.0.1", 29500, run=Asked("1", command, str(folder), "ada"))
    assert RankProcess(node, start, 0, print).local_rank_option() == expected
    assert RankProcess(node, replace(start, run=None), 0, print).local_rank_option() == UNDERSCORE


def test_a_program_that_cannot_be_started_is_named_with_what_to_write(tmp_path: Path) -> None:
    def made(name: str, text: str, mode: int = 0o755) -> str:
        (tmp_path / name).write_bytes(text.encode())
        (tmp_path / name).chmod(mode)
        return f"./{name}"

    rows = [
        ("nonsense-here", f"there is no program nonsense-here, neither in {tmp_path} nor on the PATH"),
        ("./absent.sh", "there is no program ./absent.sh"),
        (made("a.sh", "#!/bin/sh\n", 0o644), "a.sh is not executable: `chmod +x` it, or name what runs it: [sh, ./a.sh]"),
        (made("b.py", "", 0o644), "or name what runs it: [python3, ./b.py]"),
        (made("c.sh", "", 0o644), "or name what runs it: [bash, ./c.sh]"),
        (
            made("d.sh", "#!/opt/none/zsh -e\n"),
            "d.sh names /opt/none/zsh, which is not there: correct it, or name what runs it: [zsh, ./d.sh]",
        ),
        (made("e.sh", "#!/bin/sh\r\n"), "ends with a carriage return, as on Windows: sed -i"),
        (made("f.sh", "#!/usr/bin/env -S FOO=1 bash -e\n")[2:], f"f.sh is in {tmp_path}, which is not on the PATH: write ./f.sh"),
        ("./f.sh", ""),
        ("sh", ""),
    ]
    for program, expected in rows:
        problem = program_problem(program, str(tmp_path), {"PATH": "/usr/bin:/bin"})
        assert expected in problem and bool(expected) == bool(problem), (program, problem)
    assert "no folder /nowhere to work in" in program_problem("sh", "/nowhere", {})
    long = "python train.py " + "--x " * 100
    assert program_problem(long, str(tmp_path), {}) == f"there is no program {long}, neither in {tmp_path} nor on the PATH"
    assert "is not there" in program_problem(made("g.sh", f"#!/{'x' * 300}\n"), str(tmp_path), {})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("usage: a.py [-h]\na.py: error: unrecognized arguments: --local_rank=0", "set script.localRank: false"),
        ("a.py: error: unrecognized arguments: --lr 3 --local-rank=1", "set script.localRank: false"),
        ("ValueError: Some specified arguments are not used by the HfArgumentParser: ['--local_rank=0']", "set script.localRank: false"),
        ("Error: No such option: --local_rank", "set script.localRank: false"),
        ("FATAL Flags parsing error: Unknown command line flag 'local_rank'", "set script.localRank: false"),
        ("a.py: error: unrecognized arguments: --epochs=0", ""),
        ("a.py: error: the following arguments are required: --local_rank", "set script.localRank: true"),
        ("a.py: error: the following arguments are required: --data, --local-rank/--local_rank", "set script.localRank: true"),
        ("AttributeError: 'Namespace' object has no attribute 'local_rank'", "set script.localRank: true"),
        (
            "ValueError: Default process group has not been initialized, please make sure to call init_process_group.",
            "script.localRank: true",
        ),
        ("OSError: Exec format error: ./run.sh", "script.command: [bash, FILE]"),
    ],
)
def test_errors_about_the_local_rank_name_the_field(words: str, expected: str) -> None:
    assert (expected in remedy(words, ON_HOSTS)) if expected else (remedy(words, ON_HOSTS) == "")


SEEN = "import sys, os\nprint('seen', sys.argv[1:], os.environ['LOCAL_RANK'])\n"
TAKES = (
    "import argparse\np = argparse.ArgumentParser()\np.add_argument('--local_rank', type=int, required=True)\np.parse_known_args()\n" + SEEN
)


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        (TAKES, {"command": (sys.executable, "rank.py", "-x"), "local_rank": None}, "['--local_rank=1', '-x'] 1"),
        (SEEN, {"command": (sys.executable, "rank.py", "-x"), "local_rank": None}, "['-x'] 1"),
        (TAKES, {"command": (sys.executable, "-m", "rank", "-x"), "local_rank": None}, "['--local_rank=1', '-x'] 1"),
        (SEEN, {"command": ("sh", "-c", f"exec {sys.executable} rank.py $LOCAL_RANK")}, "['1'] 1"),
    ],
)
def test_each_of_two_ranks_gets_its_own(text: str, changes: dict[str, Any], expected: str, agents: Gang) -> None:
    agents.write(text, nodes=1, ranks_per_node=2, **changes)
    agents.run(codes=[0])
    assert f"[rank 1] seen {expected}" in agents.log()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"command": (sys.executable, "-m", "nano.train")}, "exited with 1: No module named 'nano': python3 -m looks in "),
        ({"command": (sys.executable, "-m", "nano")}, "No module named nano: python3 -m looks in "),
        ({"command": ("./run.sh",)}, "run.sh is not executable: `chmod +x` it, or name what runs it: [bash, ./run.sh]"),
        ({"command": ("./bare.sh",)}, "name what runs it: script.command: [bash, FILE]"),
        ({"command": (sys.executable, "rank.py"), "local_rank": True}, "set script.localRank: false"),
        ({"command": (sys.executable, "rank.py"), "working_directory": "/nowhere"}, "there is no folder /nowhere to work in"),
    ],
)
def test_a_job_that_cannot_start_says_what_to_write(changes: dict[str, Any], expected: str, agents: Gang) -> None:
    agents.write("import argparse\nargparse.ArgumentParser().parse_args()", nodes=1, restart=RestartPolicy(0, 0), **changes)
    (agents.folder / "run.sh").write_text("#!/bin/bash\n")
    (agents.folder / "bare.sh").write_text("exit 0\n")
    (agents.folder / "bare.sh").chmod(0o755)
    agents.run(codes=[1])
    assert expected in agents.record("end.json")["message"]


def test_a_script_s_programs_are_those_of_its_python_where_there_is_no_image() -> None:
    def path(run: Run, **inherited: str) -> str | None:
        return rank_environment(run, Start(1, 0, "127.0.0.1", 1), RankPlace(0, 0, 0, 0, "", "", ""), inherited).get("PATH")

    own, host = str(Path(sys.executable).parent), HostPlace()
    assert path(make_run(host=host), PATH="/usr/bin") == f"{own}:/usr/bin"
    assert path(make_run(host=host, environment={"PATH": "/mine"}), PATH="/usr/bin") == "/mine"
    assert path(make_run(host=host, training={}), PATH="/usr/bin") == path(make_run(), PATH="/usr/bin") == "/usr/bin"


def test_arguments_of_what_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "tool").chmod(0o755)
    for command, expected in [
        (("a.py", "-x"), ("python3", "a.py", "-x")),
        (("-m", "pkg.train", "-x"), ("python3", "-m", "pkg.train", "-x")),
        (("tool", "-x"), ("./tool", "-x")),
        (("hostname",), ("hostname",)),
    ]:
        assert argv(Asked("1", command, str(tmp_path), "ada")) == expected
