"""Hold the sizes of the project against scripts/budget.yaml, so that none grows without a decision.

    scripts/budget.py [--lower]

A number above its line of the file is an error. --lower writes numbers that have fallen into the file, but for the seconds: those are of
the last whole `make test` that passed in this checkout, and differ between machines.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
BUDGET = Path("scripts/budget.yaml")
SECONDS, SECONDS_FILE = "seconds of make test", Path(".lockstep/tests/seconds")
PRODUCT = ("operator", "workspace")
PLATFORM = re.compile(r"\b(hosts|local|in_namespace|\w+(Job|Backend))\b")
"""What a condition of the command line reads if it depends on the place where a job runs."""


def modules(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def public_names(tree: ast.Module) -> set[str]:
    """Functions, classes and constants at the top of a module whose names begin with no underscore."""
    names: set[str] = set()
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names |= {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def platform_branches(trees: Iterable[ast.Module]) -> int:
    nodes = (node for tree in trees for node in ast.walk(tree))
    return sum(isinstance(node, ast.If | ast.IfExp | ast.While) and bool(PLATFORM.search(ast.unparse(node.test))) for node in nodes)


def verbs_and_parameters() -> tuple[int, int]:
    """Commands that can be typed, and what they take. --help is not counted; the root command's options count once, since verbs inherit
    them.
    """
    import typer

    from lockstep.cli.main import app

    def leaves(command: Any) -> Iterator[Any]:
        subcommands = getattr(command, "commands", None)
        return (leaf for each in subcommands.values() for leaf in leaves(each)) if subcommands else iter([command])

    root: Any = typer.main.get_command(app)
    found = list(leaves(root))
    return len(found), sum(parameter.name != "help" for command in [root, *found] for parameter in command.params)


def crd_fields() -> int:
    def fields(schema: Any) -> int:
        if isinstance(schema, list):
            return sum(map(fields, schema))
        if not isinstance(schema, dict):
            return 0
        own = schema["properties"] if isinstance(schema.get("properties"), dict) else {}
        return len(own) + sum(map(fields, [*own.values(), *(value for key, value in schema.items() if key != "properties")]))

    return sum(fields(yaml.safe_load(path.read_text(encoding="utf-8"))) for path in sorted((ROOT / "manifests/crds").glob("*.yaml")))


def words() -> int:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def measured() -> dict[str, int]:
    """Each line of the budget, as it is now."""
    product = modules(*PRODUCT)
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in product}
    verbs, parameters = verbs_and_parameters()
    return {
        "product lines": lines(product),
        "test lines": lines(modules("tests")),
        "statements": sum(isinstance(node, ast.stmt) for tree in trees.values() for node in ast.walk(tree)),
        "public names": sum(len(public_names(tree)) for tree in trees.values()),
        "modules of the largest folder": max(Counter(path.parent for path in product if path.name != "__init__.py").values()),
        "platform branches of the command line": platform_branches(
            tree for path, tree in trees.items() if path.is_relative_to(ROOT / "operator/lockstep/cli")
        ),
        "verbs": verbs,
        "parameters": parameters,
        "fields of the CRDs": crd_fields(),
        "words of the docs": words(),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lower", action="store_true", help="write numbers that have fallen into the file")
    lower = parser.parse_args(arguments).lower
    text = (ROOT / BUDGET).read_text(encoding="utf-8")
    budget, now = yaml.safe_load(text), measured()
    if (ROOT / SECONDS_FILE).exists():
        now[SECONDS] = int((ROOT / SECONDS_FILE).read_text(encoding="utf-8"))
    over = [name for name in now if now[name] > budget[name]["most"]]
    for name in over:
        print(f"{BUDGET}: {name}: {now[name]}, and at most {budget[name]['most']} are allowed: {budget[name]['why']}", file=sys.stderr)
    if lower:
        for name, number in now.items():
            if number < budget[name]["most"] and name != SECONDS:
                text = re.sub(rf"(?m)^({re.escape(name)}: {{most: )\d+", rf"\g<1>{number}", text)
        (ROOT / BUDGET).write_text(text, encoding="utf-8")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
