"""Choose the tests of the rooms that a change touches: by imports, by what imports don't show, and by the lines of scripts/touched.yaml.

pytest-testmon would choose by lines that ran, but sees no forked rank, pod, host, template, or program that is sent as text.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
ALL = "all"
ALWAYS = "tests/unit/project/"
UNIT = ("tests/unit/", "tests/foreign/")
DATA = ("operator/", "workspace/", "manifests/", "images/", "clusters/")
SHARED_BY_ALL = "tests/conftest.py"
"""Every test would fail with what this imports."""
FEW = 6
"""What more files of tests than these have in common is no sign of what they test."""
LEFT_OUT = re.compile(r"^pytestmark = \[?pytest\.mark\.(long|soak|corpus)", re.MULTILINE)


def modules_of(root: Path) -> Mapping[str, Path]:
    """Map the dotted name of every module below this folder to its file; of a package, to its `__init__.py`."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def imported(nodes: Iterable[ast.AST], modules: Collection[str]) -> Iterator[str]:
    """List those of the modules that are imported, also within functions and for types alone. `nodes`: all of a module."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from (member for member in members if member in modules)
            if node.module in modules and any(member not in modules for member in members):
                yield node.module


class Tree:
    """The project's modules and test files, and which of them use which."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        paths = {name: path for top in ("operator", "workspace", "tests") for name, path in modules_of(root / top).items()}
        self.modules = {name: path.relative_to(root).as_posix() for name, path in paths.items()}
        self.text = {file: (root / file).read_text(encoding="utf-8") for file in self.modules.values()}
        self.modules |= {Path(file).stem: file for file in self.text if re.match(r"tests/(train/ranks|faults)/(?!test_)", file)}
        self.rooms = yaml.safe_load((root / "scripts/touched.yaml").read_text(encoding="utf-8"))
        nodes: dict[str, list[ast.AST]] = {}
        cases: dict[str, set[str]] = {}
        for file, text in self.text.items():
            tree = ast.parse(text)  # held no longer: there are millions of nodes, and each look for garbage walks through what is held
            nodes[file] = [node for node in ast.walk(tree) if isinstance(node, (ast.Constant, ast.Import, ast.ImportFrom))]
            if file.startswith("tests/train/ranks/"):
                cases[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        self.words = {
            file: {node.value for node in found if isinstance(node, ast.Constant) and isinstance(node.value, str)}
            for file, found in nodes.items()
        }
        self.uses = {file: self._used(file, found) for file, found in nodes.items()}
        self._add_ranks(cases)
        self._add_verbs()

    def _used(self, file: str, nodes: Iterable[ast.AST]) -> set[str]:
        """Collect what it imports, what it names as text (`python -m`, a program that is sent or started), and its folder's conftest.py."""
        names = {
            *imported(nodes, self.modules),
            *({word.removesuffix(".py").rpartition("/")[2] for word in self.words[file]} & self.modules.keys()),
        }
        above = {f"{folder.as_posix()}/conftest.py" for folder in Path(file).parents if file.startswith("tests/")} - {SHARED_BY_ALL}
        return {self.modules[name] for name in names} | above & self.text.keys()

    def _add_ranks(self, cases: Mapping[str, Collection[str]]) -> None:
        """Join a test with what it asks forked ranks for by name, and with what those functions import, if few tests do so. `cases`: the
        functions of each module of ranks.
        """
        asking = defaultdict(set)
        for file in self.tests("tests/train/"):
            asked = {case for case, names in cases.items() if self.words[file].intersection(names)}
            self.uses[file] |= asked
            for used in {used for case in asked for used in self.uses[case]}:
                asking[used].add(file)
        for used, files in asking.items():
            for file in files if len(files) <= FEW else ():
                self.uses[file].add(used)

    def _add_verbs(self) -> None:
        """Join a test of the command line with the verbs that it names, if few tests do, and with what one verb alone reaches."""
        table = re.search(r"^MODULES\b.*? = (\{.*?^\})", self.text.get("operator/lockstep/cli/verbs.py", ""), re.MULTILINE | re.DOTALL)
        rows = (ast.literal_eval(table[1]) if table else {}).items()
        places = [(verb, place) for verb, row in rows for place in ([row] if isinstance(row, str) else row[1].values())]
        modules = [(verb, f"lockstep.cli.{place.rpartition('.')[0]}") for verb, place in places]
        self.verbs = {(verb, self.modules[module]) for verb, module in modules if module in self.modules}
        own = {file: {other for other in used if other.startswith("operator/")} for file, used in self.uses.items()}
        reached = {module: leads_to(own, {module}) for _, module in self.verbs}
        often = Counter(file for files in reached.values() for file in files)
        typing = self.users({"operator/lockstep/cli/main.py"}) & set(self.tests("tests/"))
        for verb, module in self.verbs:
            naming = {file for file in typing if verb in self.words[file]}
            unit = {file for file in naming if file.startswith(UNIT)}
            for file in naming if len(naming - unit) <= FEW else unit:
                self.uses[file] |= {module, *(other for other in reached[module] if often[other] == 1)}

    def tests(self, folder: str) -> list[str]:
        """List the files of tests in a folder that `make test` runs."""
        return [
            file
            for file in self.text
            if file.startswith(folder) and Path(file).name.startswith("test_") and not LEFT_OUT.search(self.text[file])
        ]

    def users(self, changed: Collection[str], within: str = "") -> set[str]:
        """Collect what uses the changed files, through any number of others; `within`: through files of this folder alone."""
        importers = defaultdict(set)
        for file, used in self.uses.items():
            for other in used if file.startswith(within) else ():
                importers[other].add(file)
        return leads_to(importers, changed)

    def chosen(self, changed: Collection[str]) -> set[str]:
        """Choose files of tests for changed paths, which are relative to the root."""
        files = set(self.tests("tests/"))
        rooms = [room for path in changed for room in self._room(path)]
        if ALL in rooms:
            return files
        readers = {file for path in changed for file in self._readers(path)}
        unit = {file for file in self.users({*changed, *readers}) if file.startswith(UNIT)}
        direct = self.users({path for path in changed if path.startswith("tests/")}, "tests/") | {
            file for file in self.text if self.uses[file].intersection(changed)
        }
        of_rooms = {file for file in files if any(file.startswith((f"tests/{room}/", f"tests/{room}.py")) for room in rooms)}
        stems = {f"test_{Path(path).stem}" for path in changed if path.startswith(("operator/", "workspace/"))}
        return files & (unit | direct | of_rooms | {file for file in files if file.startswith(ALWAYS) or Path(file).stem in stems})

    def _room(self, path: str) -> list[str]:
        fitting = {match.end(): tests for beginning, tests in self.rooms.items() if (match := re.match(beginning, path))}
        tests = fitting[max(fitting)] if fitting else [] if path.endswith(".md") else ALL
        return [tests] if isinstance(tests, str) else tests

    def _readers(self, path: str) -> Iterator[str]:
        """List modules that name another file than a module (a template, a schema), or import a module that is gone: unit tests follow from
        them.
        """
        folder, _, name = path.rpartition("/")
        if path.endswith(".py") and path not in self.text:
            package, stem = re.escape(folder.partition("/")[2].replace("/", ".")), re.escape(name.removesuffix(".py"))
            gone = re.compile(rf"\b{package}(\.| import (.*\b)?){stem}\b")
            yield from (file for file, text in self.text.items() if gone.search(text))
        elif path.startswith(DATA) and not path.endswith(".py"):
            names, owner = {name, Path(folder).name, path}, Path(folder).parent
            short = names | {name.partition(".")[0]}
            yield from (file for file, words in self.words.items() if words & (short if Path(file).parent == owner else names))


def leads_to(edges: Mapping[str, Collection[str]], start: Collection[str]) -> set[str]:
    """Collect these, and all that is reached from them."""
    reached, rest = set(start), list(start)
    while rest:
        new = set(edges.get(rest.pop(), ())) - reached
        reached |= new
        rest += new
    return reached


def changed_since(commit: str) -> list[str]:
    """List the paths that differ from the commit, also those that git doesn't know yet. Raises CalledProcessError: there is no such
    commit.
    """
    commands = (["git", "diff", "--name-only", "--no-renames", commit, "--"], ["git", "ls-files", "--others", "--exclude-standard"])
    outputs = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout for command in commands]
    return sorted({path for output in outputs for path in output.splitlines()})
