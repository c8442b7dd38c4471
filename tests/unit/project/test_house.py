"""The shape of the source tree: where a module may lie, how large rooms and files are, and what names mean. CONTRIBUTING says where the
next line goes.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Set
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from support.checkout import ROOT
from touched import imported, modules_of

SOURCES = (ROOT / "operator", ROOT / "workspace")
DISTRIBUTIONS = ("lockstep", "lockstep_gang", "lockstep_machine", "lockstep_spec", "lockstep_train")
MODULES_MAX = 20
LINES_MAX = 500
SMALL_LINES = 60
SMALL_FOR_A_REASON: Mapping[str, str] = {
    "lockstep.api.files.patterns": "imports models that most verbs don't need",
    "lockstep.platforms.hosts.remembered": "files of this machine; the rest of its folder talks to hosts",
    "lockstep.platforms.onhost.gputest": "is sent to hosts as text, for the Python of their environments",
    "lockstep.platforms.inpod.forget": "is sent into pods as text, in one file as every such program",
    "lockstep.platforms.inpod.newest": "is sent into pods as text, in one file as every such program",
    "lockstep.platforms.inpod.runfiles": "is sent into pods as text, in one file as every such program",
    "lockstep_train.watch.beats": "is pure; its importer has the threads and the clock",
}
"""Modules below SMALL_LINES that only one other module imports → why each stands by itself."""
DEEPSPEED_ROOM = "lockstep_train.zero"
ENGINE_PUBLIC = {"module", "training", "train", "eval", "backward", "step"}
"""Attributes of DeepSpeed's engine that it documents, or that any torch module has."""
DEEPSPEED_MODULE = re.compile(r"deepspeed(\.\w+)*")
DEEPSPEED_INTERNAL = re.compile(r"ds_\w+|_hp_mapping|_zero_init_param|_convert_to_deepspeed_param|all_gather_coalesced|__compatible_ops__")
"""Attributes that DeepSpeed gives parameters, and those of its own that Lockstep replaces."""
FIRST_WORDS = {"What", "Of", "How", "Whether", "Where", "As", "By", "Who", "When", "Which", "Why"}
"""A docstring begins with a verb, or with the noun that is returned or held."""


@cache
def sources() -> Mapping[str, Path]:
    """Dotted name → file, of every module of the product; of a package, its `__init__.py`."""
    modules = {name: path for root in SOURCES for name, path in modules_of(root).items()}
    return {name: path for name, path in modules.items() if name.partition(".")[0] in DISTRIBUTIONS}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports() -> Mapping[str, Set[str]]:
    """Module → the product's modules that it imports, also within functions and for types alone."""
    return {name: frozenset(imported(ast.walk(tree_of(path)), sources())) for name, path in sources().items()}


def folder_of(module: str) -> str:
    return module if sources()[module].name == "__init__.py" else module.rpartition(".")[0]


def circle_in(graph: Mapping[str, Set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_what_imports_it() -> None:
    assert circle_in(imports()) == []


def test_no_folder_imports_what_imports_it() -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for module, others in imports().items():
        graph[folder_of(module)] |= {folder_of(other) for other in others} - {folder_of(module)}
    assert circle_in(graph) == []


def test_a_circle_is_seen() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert not circle_in({"a": {"b"}, "b": {"c"}})


@pytest.mark.parametrize("root", ["operator", "workspace", "tests", "scripts"])
def test_a_folder_has_no_more_modules_than_one_can_look_over(root: str) -> None:
    modules = Counter(path.parent.relative_to(ROOT) for path in (ROOT / root).rglob("*.py") if path.name != "__init__.py")
    assert {str(folder): number for folder, number in modules.items() if number > MODULES_MAX} == {}


def test_a_file_is_one_thought() -> None:
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in sources().items()}
    assert {name: number for name, number in lines.items() if number > LINES_MAX} == {}


def test_a_small_module_that_one_other_reads_belongs_to_it_unless_there_is_a_reason() -> None:
    importers: dict[str, set[str]] = defaultdict(set)
    for module, others in imports().items():
        for other in others:
            importers[other].add(module)
    small = {
        name
        for name, path in sources().items()
        if path.name != "__init__.py" and len(importers[name]) == 1 and len(path.read_text(encoding="utf-8").splitlines()) < SMALL_LINES
    }
    assert small == SMALL_FOR_A_REASON.keys()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_public_class_has_a_name_of_its_own(distribution: str) -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in sources().items():
        if module.partition(".")[0] == distribution:
            for node in tree_of(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def test_a_public_function_has_a_name_of_its_own_in_its_folder() -> None:
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module, path in sources().items():
        for node in tree_of(path).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_") and node.name != "main":
                places[folder_of(module), node.name].append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring: of modules, classes and functions, and below names that are assigned."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, statement in zip([None, *body], body, strict=False):
            opens = before is None and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            value = statement.value if isinstance(statement, ast.Expr) else None
            holds = opens or isinstance(before, ast.Assign | ast.AnnAssign)
            if holds and isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_docstring_begins_with_a_verb_or_a_noun(distribution: str) -> None:
    fragments = [
        f"{path.relative_to(ROOT)}:{line}: {text[:60]}"
        for module, path in sources().items()
        if module.partition(".")[0] == distribution
        for line, text in _docstrings(tree_of(path))
        if text.split(maxsplit=1)[:1] and text.split(maxsplit=1)[0] in FIRST_WORDS
    ]
    assert fragments == []


def test_programs_that_run_in_pods_need_nothing_but_python() -> None:
    for name, path in sources().items():
        if name.startswith("lockstep.platforms.inpod."):
            imported = {
                alias.name if isinstance(node, ast.Import) else node.module or ""
                for node in ast.walk(tree_of(path))
                if isinstance(node, ast.Import | ast.ImportFrom)
                for alias in node.names
            }
            others = {module for module in imported if module.partition(".")[0] not in sys.stdlib_module_names}
            assert others <= {"lockstep.platforms.inpod"} | {
                one for one in others if one.startswith(("lockstep.platforms.inpod.", "lockstep_machine.", "lockstep_spec."))
            }, name


def deepspeed_uses(tree: ast.AST) -> Iterator[str]:
    """Yield line and name of all that only the room of DeepSpeed may use: its modules, what it adds to parameters, and its engine's own
    state.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                yield from (f"{node.lineno}: {alias.name}" for alias in aliases if DEEPSPEED_MODULE.fullmatch(alias.name))
            case ast.ImportFrom(module=str(module), level=0) if DEEPSPEED_MODULE.fullmatch(module):
                yield f"{node.lineno}: {module}"
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name) if owner in {"engine", "_engine"}:
                if name not in ENGINE_PUBLIC:
                    yield f"{node.lineno}: engine.{name}"
            case ast.Attribute(attr=str(name)) | ast.Constant(value=str(name)) if DEEPSPEED_INTERNAL.fullmatch(name):
                yield f"{node.lineno}: {name}"
            case ast.Constant(value=str(name)) if DEEPSPEED_MODULE.fullmatch(name):
                yield f"{node.lineno}: {name}"


def test_only_one_room_knows_deepspeed() -> None:
    uses = {
        name: found
        for name, path in sources().items()
        if name.startswith("lockstep_train.") and not f"{name}.".startswith(f"{DEEPSPEED_ROOM}.")
        if (found := list(deepspeed_uses(tree_of(path))))
    }
    assert uses == {}, f"call a function of {DEEPSPEED_ROOM}, whose internals tests/unit/train/test_deepspeed.py lists"


@pytest.mark.parametrize(
    ("line", "use"),
    [
        ("import deepspeed.ops", "deepspeed.ops"),
        ("from deepspeed.utils import groups", "deepspeed.utils"),
        ("import_module('deepspeed.ops')", "deepspeed.ops"),
        ("parameter.ds_id", "ds_id"),
        ("getattr(parameter, 'ds_shape', parameter.shape)", "ds_shape"),
        ("parameter._hp_mapping", "_hp_mapping"),
        ("replaced(Init, '_zero_init_param', other)", "_zero_init_param"),
        ("run.engine.optimizer.overflow", "engine.optimizer"),
        ("self._engine.get_global_grad_norm()", "engine.get_global_grad_norm"),
        ("engine.global_steps = 3", "engine.global_steps"),
        ("engine.backward(loss)", None),
        ("training.deepspeed['fp16']", None),
    ],
)
def test_a_use_of_deepspeed_is_seen(line: str, use: str | None) -> None:
    assert list(deepspeed_uses(ast.parse(line))) == ([] if use is None else [f"1: {use}"])
