"""Every kubectl and oc line that this project tells people to type: those of its pages, of comments in its files and of what its programs
print.

A line begins at `kubectl` or `oc`, and ends where a shell would end the command or where the sentence goes on. What isn't a command stands
in `PROSE`, with its reason: no text with one of the two words is lost, but for the docstrings of programs (those that people read are in
the pages, too).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from lockstep.api.objects import Typed
from lockstep.plan.ahead.submission import SubmittedAs
from support.checkout import ROOT

BEGINS = re.compile(r"(?<![\w./$-])(?:kubectl|oc)(?= [a-z-])")
ENDS = re.compile(r"[|;&`)]|\s#|\s>|\s\(|[,:.](?:\s|$)|\s{2,}|\s(?:as|does|ends|gives|lists|of|on|or|removes|says|shows|so|to|too)\s")
"""Marks of a shell, and what stands where a sentence goes on."""
PATTERN = re.compile(r"\\S|\[\^|\(\?:")
"""What a text has that searches messages for commands: the messages' own texts are collected."""
TEMPLATE = re.compile(r"\{(\w+)\}")
"""A value of str.format."""
CUT = " …"
A_VALUE = "x"
HOLES = {
    "patch": "{}", "fewer": "1", "kind": "configmap", "source": "file=FILE", "kind.lower()": "deployment",
        "item['kind'].lower()": "service", "again": "-n x",
}  # fmt: skip
"""What stands for a value in a text, if it isn't one word."""
OC_ONLY = {"adm", "cancel-build", "login", "new-project", "policy", "rsh", "rsync", "secrets"}
"""Commands that kubectl doesn't have."""
OF_ADM = {"cordon", "drain", "taint", "top", "uncordon"}
"""Commands of kubectl that are `oc adm`'s."""
A_PLUGIN = "the plugin, which is this project's own command line"
A_PROGRAM = "speaks of the program"
PROSE = {
    "kubectl": A_PROGRAM, "oc": A_PROGRAM, "kubectl yourself": A_PROGRAM, "kubectl nor oc is installed": A_PROGRAM,
        "oc is installed": A_PROGRAM, "kubectl does": A_PROGRAM,
    "kubectl lockstep VERB": A_PLUGIN, "oc lockstep VERB": A_PLUGIN,
    "kubectl create secret docker-registry none-such": "a step's beginning, which is compared",
}  # fmt: skip
"""Texts that are no commands to type, and why."""
ALONE_WORD = re.compile(r"(?:^|[\s(`])(?:kubectl|oc)\s*$")
ALONE = {
    "operator/lockstep/cli/clusters/doctor.py": "looks for the programs", 
    "operator/lockstep/devcluster/cluster.py": "runs it",
    "operator/lockstep/plan/ahead/submission.py": "joins the lines of `SubmittedAs.apply`", "scripts/pictures/scenes.py": "runs it",
    "scripts/release/installyaml.py": "begins the lines at the top of install files, which docs/releases.md has, too",
}  # fmt: skip
"""Programs that have one of the words alone or at a text's end, from which they may join a line, and what they do with it."""


@dataclass(frozen=True)
class Line:
    """One command as it would be typed, and where it stands."""

    text: str
    place: str
    is_named: bool = False
    """True if it may be the command's name alone, with or without options: it is quoted in a sentence, or one of another tool's words."""

    @property
    def command(self) -> str:
        """The word after `kubectl` or `oc`."""
        return self.text.split()[1]


def all_texts() -> list[Line]:
    """Every text once for each place where it stands, prose included."""
    return [*_of_texts(), *_of_words(), *_of_programs(), *_of_functions()]


def all_lines() -> list[Line]:
    return [line for line in all_texts() if line.text not in PROSE]


def _of_texts() -> Iterator[Line]:
    """Lines of pages, of the command line's topics, and of the comments and texts of other files."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    folders = ("clusters", "images", "manifests", "operator", "scripts", "workspace")
    others = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in ("", ".j2", ".sh", ".txt", ".yaml", ".yml")
    ]
    for path in sorted([*pages, *others, ROOT / "Makefile", ROOT / "docs/tested.yaml"]):
        if path.is_file():
            text = path.read_text(encoding="utf-8").replace("\\\n", " ").replace("\\|", "|")
            for number, words in enumerate(text.splitlines(), 1):
                yield from commands(words, f"{path.relative_to(ROOT)}:{number}")


def _of_words() -> Iterator[Line]:
    """The first column of the two tables that say which verb stands for which command of kubectl."""
    page, topic = "docs/how-to/commands-of-other-tools.md", "operator/lockstep/cli/topics/words.txt"
    table = (ROOT / page).read_text(encoding="utf-8").partition("| kubectl, oc |")[2].partition("\n\n")[0]
    cells = [cell for row in table.splitlines()[2:] for cell in re.findall(r"`([^`]+)`", row.split("|")[1])]
    for cell in cells:
        yield Line(cell if cell.startswith("oc ") else f"{'oc' if cell in OC_ONLY else 'kubectl'} {cell}", page, is_named=True)
    rows = (ROOT / topic).read_text(encoding="utf-8").partition("kubectl")[2].partition("\n\n")[0].splitlines()[1:]
    starts = [cell for row in rows if (cell := re.split(r"\s{2,}", row)[1]) and row.index(cell) == 2]
    yield from (Line(f"kubectl {cell}", topic, is_named=True) for cell in starts)


def _of_programs() -> Iterator[Line]:
    for place, text in _texts():
        for words in [] if PATTERN.search(text) else text.splitlines():
            yield from commands(words, place)


def alone() -> set[str]:
    """Programs that have one of the words by itself, or at a text's end."""
    return {place.partition(":")[0] for place, text in _texts() if ALONE_WORD.search(text)}


@cache
def _texts() -> list[tuple[str, str]]:
    """The texts of all programs, and where they stand."""
    paths = [path for root in ("operator", "workspace", "scripts") for path in sorted((ROOT / root).rglob("*.py"))]
    trees = [(str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))) for path in paths]
    return [(f"{name}:{number}", text) for name, tree in trees for number, text in _texts_of(tree)]


def _texts_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The texts of a program with their lines, a word for each value; docstrings are left out."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inner |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in inner:
            continue
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, _filled(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _filled(text: ast.JoinedStr) -> str:
    filled = ""
    for part in text.values:
        if isinstance(part, ast.FormattedValue):
            filled += _value(ast.unparse(part.value), filled)
        elif isinstance(part, ast.Constant):
            filled += str(part.value)
    return filled


def _value(name: str, before: str) -> str:
    """What stands for a value: one word, unless the table has more; a place is a namespace or the option for it, with a space in front
    where none is.
    """
    if name in ("place", "where") and not before.endswith((" -n ", "namespace ")):
        return "-n x" if before.endswith(" ") else " -n x"
    return HOLES.get(name, A_VALUE)


def _of_functions() -> Iterator[Line]:
    """Lines of functions that join them from words."""
    for options in ((), ("--set", "nodes=3")):
        typed = SubmittedAs(Typed("job.yaml", options, context="x"), "local", "ml", "")
        yield from commands(typed.apply("local", "local"), "SubmittedAs.apply")


def commands(text: str, place: str) -> Iterator[Line]:
    """The commands of one line of text, each without what follows it."""
    if TEMPLATE.search(text):
        text = TEMPLATE.sub(lambda match: _value(match[1], text[: match.start()]), text).replace("{{", "{").replace("}}", "}")
    for match in BEGINS.finditer(text):
        left = text[match.start() :]
        end = _end(left)
        yield Line(left[:end].strip(), place, is_named=left[end : end + 1] == "`")


def _end(text: str) -> int:
    """Where the command ends with which the text begins."""
    quote, depth = "", 0
    for at, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"" and not text[at - 1].isalnum():
            quote = letter
        elif depth or (letter == "(" and text[at - 1] == "$"):
            depth += (letter == "(") - (letter == ")")
        elif ENDS.match(text, at):
            return at
    return len(text)
