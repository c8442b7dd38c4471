"""Choose the tests of the rooms that a change touches: by imports, by what imports don't show, and by the lines of scripts/touched.yaml.

pytest-testmon would choose by lines that ran, but sees no forked rank, pod, host, template, or program that is sent as text.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
ALL = "all"
ALWAYS = "tests/unit/project/"
DATA = ("operator/", "workspace/", "manifests/", "images/", "clusters/")
SHARED_BY_ALL = "tests/conftest.py"
"""Every test would fail with what this imports."""
LEFT_OUT = re.compile(r"^pytestmark = \[?pytest\.mark\.(long|soak|corpus)", re.MULTILINE)


def modules_of(root: Path) -> Mapping[str, Path]:
    """Map the dotted name of every module below this folder to its file; of a package, to its `__init__.py`."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def imported(tree: ast.Module, modules: Collection[str]) -> Iterator[str]:
    """List those of the modules that are imported, also within functions and for types alone."""
    for node in ast.walk(tree):
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
        trees = {file: ast.parse(text) for file, text in self.text.items()}
        self.words = {
            file: {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
            for file, tree in trees.items()
        }
        self.uses = {file: self._used(file, tree) for file, tree in trees.items()}
        self._add_ranks(trees)
        self._add_verbs()

    def _used(self, file: str, tree: ast.Module) -> set[str]:
        """Collect what it imports, what it names as text (`python -m`, a program that is sent or started), and its folder's conftest.py."""
        names = {
            *imported(tree, self.modules),
            *({word.removesuffix(".py").rpartition("/")[2] for word in self.words[file]} & self.modules.keys()),
        }
        above = {f"{folder.as_posix()}/conftest.py" for folder in Path(file).parents if file.startswith("tests/")} - {SHARED_BY_ALL}
        return {self.modules[name] for name in names} | above & self.text.keys()

    def _add_ranks(self, trees: Mapping[str, ast.Module]) -> None:
        """Join a test with the functions that it asks forked ranks for by their names."""
        cases = {
            file: {node.name for node in trees[file].body if isinstance(node, ast.FunctionDef)}
            for file in self.text
            if file.startswith("tests/train/ranks/")
        }
        for file in self.tests("tests/train/"):
            self.uses[file] |= {case for case, names in cases.items() if names & self.words[file]}

    def _add_verbs(self) -> None:
        """Join a test of the command line with the verbs that it names."""
        table = re.search(r"^MODULES = (\{.*?^\})", self.text.get("operator/lockstep/cli/verbs.py", ""), re.MULTILINE | re.DOTALL)
        self.verbs = {
            verb: f"lockstep.cli.{place.rpartition('.')[0]}" for verb, place in (ast.literal_eval(table[1]) if table else {}).items()
        }
        typing = self.users({"operator/lockstep/cli/main.py"})
        for file in typing & set(self.tests("tests/")):
            self.uses[file] |= {
                self.modules[module] for verb, module in self.verbs.items() if verb in self.words[file] and module in self.modules
            }

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
        reached, rest = set(changed), list(changed)
        while rest:
            new = importers[rest.pop()] - reached
            reached |= new
            rest += new
        return reached

    def chosen(self, changed: Collection[str]) -> set[str]:
        """Choose files of tests for changed paths, which are relative to the root."""
        files = set(self.tests("tests/"))
        rooms = [room for path in changed for room in self._room(path)]
        if ALL in rooms:
            return files
        sources = set(changed) | {file for path in changed for file in self._readers(path)}
        unit = {file for file in self.users(sources) if file.startswith("tests/unit/")}
        direct = self.users({path for path in changed if path.startswith("tests/")}, "tests/") | {
            file for file in self.text if self.uses[file] & sources
        }
        of_rooms = {file for file in files if any(file.startswith((f"tests/{room}/", f"tests/{room}.py")) for room in rooms)}
        stems = {f"test_{Path(path).stem}" for path in sources if path.startswith(("operator/", "workspace/"))}
        return files & (unit | direct | of_rooms | {file for file in files if file.startswith(ALWAYS) or Path(file).stem in stems})

    def _room(self, path: str) -> list[str]:
        fitting = [beginning for beginning in self.rooms if path.startswith(beginning)]
        if not fitting:
            return [] if path.endswith(".md") else [ALL]
        tests = self.rooms[max(fitting, key=len)]
        return [tests] if isinstance(tests, str) else tests

    def _readers(self, path: str) -> Iterator[str]:
        """List modules that name another file than a module (a template, a schema, a sample), or import a module that is gone."""
        if path.endswith(".py") and path not in self.text:
            folder, _, stem = path.removesuffix(".py").partition("/")[2].replace("/", ".").rpartition(".")
            gone = re.compile(rf"\b{re.escape(folder)}(\.| import (.*\b)?){re.escape(stem)}\b")
            yield from (file for file, text in self.text.items() if gone.search(text))
        elif path.startswith(DATA) and not path.endswith(".py"):
            names = {Path(path).name, Path(path).parent.name, path}
            yield from (file for file, words in self.words.items() if names & words)


def changed_since(commit: str) -> list[str]:
    """List the paths that differ from the commit, also those that git doesn't know yet. Raises CalledProcessError: there is no such commit."""
    commands = (["git", "diff", "--name-only", "--no-renames", commit, "--"], ["git", "ls-files", "--others", "--exclude-standard"])
    return sorted(
        {
            path
            for command in commands
            for path in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
            if path
        }
    )
