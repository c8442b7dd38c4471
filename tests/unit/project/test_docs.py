"""The documentation is true: what it names exists, its links lead somewhere, its commands can be typed, its messages are those of the
code.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from lockstep.cli.main import app
from lockstep.cli.topics import FOLDER, TOPICS
from lockstep.plan.render.resolve import trainer_image
from support.checkout import ROOT

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]\[]*\]\(([^)\s]+)\)")
HOLE = "…"
VERBS: Any = typer.main.get_command(app)


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_test_that_the_failure_modes_name_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/reference/failure-modes.md").read_text()))
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    missing = [name for name in sorted(named) if not any(f"def {name}(" in source for source in sources)]
    assert named
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_a_link_leads_to_a_file_and_to_a_heading_in_it(page: Path) -> None:
    broken = [link for link in LINK.findall(_without_code(page.read_text())) if not _leads_somewhere(page, link)]
    assert broken == []


def _without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def _leads_somewhere(page: Path, link: str) -> bool:
    if re.match(r"[a-z]+:", link):
        return True
    name, _, heading = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    return target.exists() and (not heading or heading in _headings(target.read_text()))


def _headings(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", _without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def _commands(page: Path) -> Iterator[str]:
    """What is typed: in a line of a code block or between backquotes, from `lockstep` on."""
    text = page.read_text()
    blocks = re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL)
    quoted = re.findall(r"`(lockstep [^`]+)`", _without_code(text))
    for line in [*quoted, *(line for block in blocks for line in block.splitlines() if re.match(r"\s*(?:\$ |sudo )*lockstep ", line))]:
        yield re.sub(r"\s{2,}.*|\s+#.*|[;|&>].*", "", line[line.index("lockstep ") + 9 :]).strip()


def _wrong(command: str) -> str | None:
    """Why it can't be typed: no such verb, or the verb has no such option. Prose after a verb is left alone."""
    words = shlex.split(command.partition(" -- ")[0].replace("'", " ").replace('"', " "))
    group: Any = VERBS
    while words and hasattr(group, "commands"):
        if words[0].startswith("-"):
            break
        if not re.fullmatch(r"[a-z][a-z-]*", words[0]):
            return None  # PATH, …: the name stands for any
        if words[0] not in group.commands:
            return f"no verb {words[0]} in: lockstep {command}"
        group = group.commands[words.pop(0)]
    unknown = [option for option in _options(group, words) if option not in {"--help", "-h", *_takes_value(group)}]
    return f"{unknown[0]} is no option in: lockstep {command}" if unknown else None


def _takes_value(verb: Any) -> dict[str, bool]:
    """Each option of a verb, and whether the next word is its value."""
    return {
        name: not getattr(parameter, "is_flag", False)
        for parameter in [*verb.params, *VERBS.params]
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("-")
    }


def _options(verb: Any, words: list[str]) -> Iterator[str]:
    """The options among the words; those after the name of a script are the script's."""
    takes_value, left = _takes_value(verb), iter(words)
    for word in left:
        name, _, given = word.partition("=")
        if re.match(r"--?[a-z]", word):
            yield name
            if takes_value.get(name) and not given:
                next(left, None)
        elif not verb.context_settings.get("allow_interspersed_args", True):
            return


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_a_command_of_a_page_has_a_verb_and_options_that_exist(page: Path) -> None:
    wrong = [text for command in _commands(page) for word in command.split("|") if (text := _wrong(word)) is not None]
    assert wrong == []


def test_every_make_target_of_the_pages_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    typed = {
        (_id(page), name)
        for page in PAGES
        for name in re.findall(r"(?:^|`|\$ |sudo )make ([a-z][a-z-]+)", page.read_text(), re.MULTILINE)
        if name not in targets
    }
    assert typed == set()


def _texts(tree: ast.AST, *, without: frozenset[int] = frozenset()) -> Iterator[str]:
    """Every text of a program, with a hole where a value goes into it; those `without` are left out, by their id."""
    for node in ast.walk(tree):
        if id(node) in without:
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def _programs() -> list[ast.AST]:
    paths = [path for root in ("operator", "workspace") for path in sorted((ROOT / root).rglob("*.py"))]
    return [ast.parse(path.read_text()) for path in paths]


@cache
def _said_by_the_code() -> list[str]:
    return [text for tree in _programs() for text in _texts(tree)]


def _messages(tree: ast.AST) -> Iterator[str]:
    """What a program may say to a person: no docstring, and no piece of a text that has values in it."""
    nodes = list(ast.walk(tree))
    pieces = {id(piece) for node in nodes if isinstance(node, ast.JoinedStr) for piece in ast.walk(node) if piece is not node}
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return _texts(tree, without=frozenset(pieces | docstrings))


TYPED = re.compile(r"(?<![\w./`-])lockstep (?!agent:|in a checkout)([a-z][a-z-]*(?: [^\s`]+)*)")


def _lacking(command: str) -> str | None:
    """Which argument isn't there that the verb demands."""
    verb, given = _arguments_of(command)
    wanted = [parameter.name for parameter in verb.params if parameter.required and not parameter.opts[0].startswith("-")]
    return f"lockstep {command} lacks {wanted[given]}" if given < len(wanted) else None


def _arguments_of(command: str) -> tuple[Any, int]:
    """The verb, and how many arguments it is given."""
    group, words = VERBS, command.partition(" -- ")[0].split()
    while words and hasattr(group, "commands") and words[0] in group.commands:
        group = group.commands[words.pop(0)]
    takes_value, given, left = _takes_value(group), 0, iter(words)
    for word in left:
        given += not word.startswith("-")
        if takes_value.get(word):
            next(left, None)
    return group, given


def _unlike(command: str) -> str | None:
    """What else keeps a command without any prose from being typed as it stands."""
    verb, given = _arguments_of(command)
    arguments = [parameter for parameter in verb.params if not parameter.opts[0].startswith("-")]
    if given > len(arguments) and all(parameter.nargs == 1 for parameter in arguments):
        return f"lockstep {command} has {given - len(arguments)} words too many"
    options = [parameter.opts for parameter in verb.params if parameter.required and parameter not in arguments]
    return next((f"lockstep {command} lacks {opts[0]}" for opts in options if not set(opts) & set(command.split())), None)


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "how-to" or page.parent == ROOT], ids=_id)
def test_a_command_with_an_option_has_its_arguments_too(page: Path) -> None:
    """Prose may name a verb alone."""
    typed = [word for command in _commands(page) for word in command.split("|") if re.search(r"(?:^| )--?[a-z]", word)]
    assert [text for command in typed if (text := _lacking(command)) is not None] == []


@pytest.mark.parametrize("topic", TOPICS)
def test_a_command_of_a_help_topic_can_be_typed_as_it_stands(topic: str) -> None:
    lines = re.findall(r"^  lockstep (.*?)(?:  .*)?$", (FOLDER / f"{topic}.txt").read_text(), re.MULTILINE)
    assert [text for command in lines if (text := _wrong(command) or _lacking(command) or _unlike(command)) is not None] == []


DEPLOYING = ("README.md", "docs/how-to/quick-start.md", "docs/how-to/deploy.md", "docs/how-to/images.md")


@pytest.mark.parametrize("page", DEPLOYING)
def test_a_page_that_pushes_the_operator_s_image_pushes_the_one_that_ranks_run_in_beside_it(page: str) -> None:
    text = (ROOT / page).read_text()
    operators = set(re.findall(r"(?:--tag |TAG=)(\S*lockstep-operator:\S+)", text))
    trainers = set(re.findall(r"(?:--tag |TAG=)(\S*lockstep-trainer:\S+)", text))
    assert operators and {trainer_image(image) for image in operators} == trainers


def test_a_platform_that_a_page_or_a_help_topic_names_is_one_that_a_cluster_file_takes() -> None:
    files = [*PAGES, *FOLDER.iterdir()]
    named = {(_id(file), value) for file in files for value in re.findall(r"\bplatform: (\w+)", file.read_text())}
    assert named and {value for _, value in named} <= {"kubernetes", "openshift", "hosts"}, named


def test_a_command_that_a_message_advises_can_be_typed_as_it_stands() -> None:
    said = [text for tree in _programs() for text in _messages(tree)]
    advised = [re.split(r"[;:,.](?:\s|$)|[()|&>→#]|\s{2,}", found)[0].strip() for text in said for found in TYPED.findall(text)]
    assert {"doctor", f"why {HOLE} -n {HOLE}"} <= set(advised)
    wrong = {text for command in advised if (text := _wrong(command) or _lacking(command)) is not None}
    assert wrong == set()


SAID_TO_MAKE = {
    "CLUSTER": "mine", "MODE": "rdma", "OPERATOR_IMAGE": "registry/x:1", "NAME": "mine", "JOB": "x", "NODE": "1", "RANK": "3",
        "SCRIPT": "a.py", "ARGS": "-v",
    "BASE": "b", "TAG": "t", "TOOL": "podman", "NAMESPACE": "n", "DEV": "0",
        **dict.fromkeys(("FORCE", "YES", "PVCS", "JOBS", "SAVE", "WATCH", "ERRORS", "PUSH"), "1"),
}  # fmt: skip


@pytest.mark.parametrize("variables", [{"NAME": "mine"}, SAID_TO_MAKE], ids=["nothing said", "everything said"])
def test_every_make_target_types_a_verb_and_options_that_exist(variables: dict[str, str]) -> None:
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    words = ["make", "-n", *targets, *(f"{name}={value}" for name, value in variables.items())]
    printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    commands = re.findall(r"^\.venv/bin/lockstep (.*)$", printed, re.MULTILINE)
    assert len(commands) > len(VERBS.commands) / 2
    assert [text for command in commands if (text := _wrong(command) or _lacking(command)) is not None] == []


MESSAGES = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/how-to/troubleshooting.md").read_text(), re.MULTILINE)


def test_there_are_messages_to_look_for() -> None:
    assert len(MESSAGES) > 40


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_that_is_explained_is_one_that_the_code_says(message: str) -> None:
    pattern = re.compile(".*".join(re.escape(part) for part in message.split(HOLE)), re.DOTALL)
    if not any(pattern.search(text) for text in _said_by_the_code()):
        pytest.fail(f"docs/how-to/troubleshooting.md quotes a sentence that the code no longer says: {message}", pytrace=False)


FIGURE = re.compile(r"(?<![\w.-])\d[\d.,]*[  -]?(?:[kMGT]i?B(?:/s)?|Gb/s|ms|µs|s|seconds|min|minutes|tokens/s)(?![\w/-])")
"""A number with a unit of time, size or speed."""
MEASURED = re.compile(
    r"\b(?:took|measured|gave|has given|have given|by the clock|load average|processor time|(?:two|[2-9]\d*) cores|idle machine|busy|quiet"
    r" machine)\b",
    re.IGNORECASE,
)
"""Words by which a figure says that somebody has measured it; a limit or a default has none of them."""
COMMAND = re.compile(r"(?:^|`|\$ )(?:time |sudo )?(?:make|lockstep|pytest|podman|\.ci/run|\.venv/bin/\w+)\b|tests/[\w/]+\.py", re.MULTILINE)
NEAR = 2
"""Paragraphs, tables or code blocks before and after a claim, in its section, that its command may stand in."""
CLAIMS = [page for page in PAGES if page.parent.name != "reference"]


def _unproven(text: str, near: int) -> list[str]:
    """Paragraphs, list items and rows of tables that claim a measurement, without a command to repeat it with near them."""
    unproven = []
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        blocks = re.split(r"(```.*?```)|\n\s*\n", section, flags=re.DOTALL)
        parts = [block.strip() for block in blocks if block and block.strip()]
        for number, part in enumerate(parts):
            around = "\n".join(parts[max(0, number - near) : number + near + 1])
            if not part.startswith("```") and not COMMAND.search(around):
                unproven += [item for item in re.split(r"\n(?=[|-])", part) if _claims(item)]
    return unproven


def _claims(text: str) -> bool:
    return bool(FIGURE.search(re.sub(r"`[^`]*`", "", text)) and MEASURED.search(text))


@pytest.mark.parametrize("page", CLAIMS, ids=_id)
def test_a_figure_that_claims_a_measurement_has_its_command_near_it(page: Path) -> None:
    whole_section = page.name in ("benchmarks.md", "reliability.md")  # each of their sections begins with its command
    assert _unproven(page.read_text(), near=1000 if whole_section else NEAR) == []


@pytest.mark.parametrize(
    ("text", "claims"),
    [
        ("TCP over an overlay network has given 1 GB/s between two nodes whose NICs gave 194.", 1),
        ("A warm start takes 10 to 14 seconds on two cores.", 1),
        ("| way | |\n|---|---|\n| x | 41 s by the clock |", 1),
        ("One million lines took 393 s.\n\n# Next\n\n`make test`", 1),
        ("`make test`\n\nOne.\n\nTwo.\n\nOne million lines took 393 s.", 1),
        ("One million lines took 393 s (`python tests/bench/x.py`).", 0),
        ("One million lines took 393 s:\n```\nmake bench\n```", 0),
        ("What is there after 150 s is killed; a line every 30 s.", 0),
    ],
)
def test_what_claims_a_measurement_is_recognized(text: str, claims: int) -> None:
    assert len(_unproven(text, NEAR)) == claims


def test_every_bench_that_a_page_names_exists() -> None:
    named = {name for page in PAGES for name in re.findall(r"tests/[\w/]+\.py", page.read_text())}
    assert len(named) > 10
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


def test_every_function_of_the_walks_is_in_its_file() -> None:
    rows = re.findall(r"^\|(?: \d \|)? `([\w/]+\.py)` \| `(\w+)` \|", (ROOT / "docs" / "walks.md").read_text(), re.MULTILINE)
    roots = [ROOT / root for root in ("operator/lockstep", "workspace/lockstep_gang", "workspace/lockstep_gang/agent")]
    texts = {(path, name): "".join(file.read_text() for root in roots if (file := root / path).is_file()) for path, name in rows}
    assert len(texts) > 20
    assert [place for place, text in texts.items() if not re.search(rf"\b(def|class) {place[1]}\b", text)] == []


def test_links_of_a_page_s_markdown_that_leave_docs_lead_to_the_site_s_copies() -> None:
    code = (
        "from hooks import with_links_inside as w; print(w('[m](../../Makefile) [d](deploy.md#deploy) [r](../../README.md)',"
        " 'how-to/x.md'))"
    )
    python = subprocess.run(
        [sys.executable, "-c", "from lockstep.environments import cache_root, packages; print(packages('docs', cache_root(), str) /"
                               " 'bin/python')"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")}, capture_output=True, text=True, check=True,
    ).stdout.split()[-1]  # fmt: skip
    done = subprocess.run(
        [python, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT / "scripts/site")}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[m](../files/Makefile.txt) [d](deploy.md#deploy) [r](../files/README.md.txt)"
