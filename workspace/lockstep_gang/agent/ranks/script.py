"""The program of a rank: its argument list, its presence on this node, what its text says of --local_rank, and what lies beside it."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lockstep_gang.contract.interactive import Asked, Find, Found
from lockstep_gang.contract.preflight import ProgramFact
from lockstep_gang.contract.run import Run
from lockstep_spec.files import module_files, parsed, read_regular, read_source, shebang
from lockstep_spec.senders import Senders
from lockstep_spec.words import any_of

PYTHON = "python3"
MODULE = "-m"
_MISSING = any_of(
    r"""(?:FileNotFoundError\b.*?|No such file or directory: )(['"])(?P<file>[^/~'"][^'"]*)\1""",
    r"No module named '?(?P<package>\w+)",
)
DIGEST_BYTES_MAX = 16 * 1024 * 1024
LOCAL_RANK, LOCAL_RANK_DASHED = "--local_rank", "--local-rank"
"""The option that DeepSpeed's launcher gives, and the same as torch.distributed.launch writes it."""
_MENTION = re.compile(rb"local[_-]rank")
_DECLARES = ("add_argument", "add_option", "option", "Option")
"""Calls of argparse, optparse, click and typer that declare an option; absl's are DEFINE_integer and the like."""


def argv(asked: Asked) -> tuple[str, ...]:
    """Return the argument list of a run that was asked for. `x.py` and `-m module` go to Python; anything else is a program, of the folder
    before the PATH.
    """
    first, *rest = asked.command
    if first == MODULE or is_script(first):
        return (PYTHON, *asked.command)
    here = "/" not in first and os.access(Path(asked.folder) / first, os.X_OK)
    return (f"./{first}" if here else first, *rest)


def is_script(first: str) -> bool:
    return first.endswith(".py")


def with_local_rank(command: Sequence[str], option: str, local_rank: int) -> tuple[str, ...]:
    """Return the argument list with the option right behind the name of the script or module, as DeepSpeed's launcher writes it; '':
    none.
    """
    at = 3 if command[1:2] == (MODULE,) else 2
    return (*command[:at], *([f"{option}={local_rank}"] if option else []), *command[at:])


def local_rank_option(command: Sequence[str], folder: str, environment: Mapping[str, str], stated: bool | None) -> str:
    """Return the option by which each rank of a Python program gets its local rank; '': none. `stated`: whether it gets it; None: its text
    decides.

    The text has to take it as an option, in the program's file or in one beside it that it imports: who reads LOCAL_RANK alone would refuse
    it. Blocking: a volume may be slow.
    """
    if stated is False or any(word.partition("=")[0] in (LOCAL_RANK, LOCAL_RANK_DASHED) for word in command):
        return ""
    file = next(_files_of(command, folder, environment), None)
    found = _declared(file, Path(folder) if command[1] == MODULE else file.parent) if file is not None else ""
    return found or (LOCAL_RANK if stated else "")


def _files_of(command: Sequence[str], folder: str, environment: Mapping[str, str]) -> Iterator[Path]:
    """Files that ranks may run: a module's in the folder or on PYTHONPATH, or the one that the command names first."""
    first, *rest = command
    if rest[:1] == [MODULE] and rest[1:]:
        roots = ["", *environment.get("PYTHONPATH", "").split(os.pathsep)]
        paths = (Path(folder, root, name) for root in roots for name in module_files(rest[1]))
        return filter(os.path.isfile, paths)
    words = [first] if first.startswith(".") else [word for word in rest if not word.startswith("-")][:1]
    return filter(os.path.isfile, (Path(folder, word) for word in words))


def _declared(file: Path, root: Path | None) -> str:
    """Option for the local rank that a file declares, or a file below `root` that it imports, if it speaks of a local rank at all; '':
    none.
    """
    tree = parsed(file) if _MENTION.search(read_source(file)) else None
    nodes = list(ast.walk(tree)) if tree is not None else []
    options = {option for node in nodes if isinstance(node, ast.Call) for option in _options_of(node)}
    if options or root is None:
        return LOCAL_RANK if LOCAL_RANK in options else max(options, default="")
    return next(filter(None, (_declared(other, None) for node in nodes for other in _imported(node, file, root))), "")


def _options_of(call: ast.Call) -> Iterator[str]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else ""
    words = [word.value for word in call.args if isinstance(word, ast.Constant)]
    if name in _DECLARES:
        yield from (word for word in words if word in (LOCAL_RANK, LOCAL_RANK_DASHED))
    elif name.startswith("DEFINE_") and words[:1] == ["local_rank"]:
        yield LOCAL_RANK


def _imported(node: ast.AST, file: Path, root: Path) -> Iterator[Path]:
    """Files that an import may read: below `root`, or beside the file for a relative one."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        module, level = (node.module or "", node.level) if isinstance(node, ast.ImportFrom) else ("", 0)
        base = (file.parents[level - 1] if 0 < level <= len(file.parents) else root).joinpath(*module.split("."))
        for path in (base, *(base.joinpath(*name.name.split(".")) for name in node.names)):
            yield from (path.parent / f"{path.name}.py", path / "__init__.py")


def program_problem(program: str, folder: str, environment: Mapping[str, str]) -> str:
    """Return why a program can't be started in the folder, and what to write instead; '' where nothing is known against it."""
    if not os.path.isdir(folder):  # noqa: PTH112 (here and below: where one may not look, this is an answer, and no OSError)
        return f"there is no folder {folder} to work in"
    on_path = None if "/" in program else shutil.which(program, path=environment.get("PATH"))
    file = Path(on_path) if on_path else Path(folder) / program
    if not os.path.isfile(file):  # noqa: PTH113
        return f"there is no program {program}" + ("" if "/" in program else f", neither in {folder} nor on the PATH")
    path, name = shebang(file)
    instead = f"name what runs it: [{name.strip() or (PYTHON if is_script(program) else 'bash')}, {program}]"
    problems = {
        f"{file} is not executable: `chmod +x` it, or {instead}": not os.access(file, os.X_OK),
        f"{program} is in {folder}, which is not on the PATH: write ./{program}": on_path is None and "/" not in program,
        f"the first line of {file} ends with a carriage return, as on Windows: sed -i 's/\\r$//' {file}, or {instead}": "\r" in path + name,
        f"the first line of {file} names {path}, which is not there: correct it, or {instead}": (path and not os.path.isfile(path)),  # noqa: PTH113
    }
    return next((problem for problem, holds in problems.items() if holds), "")


def look(find: Find, node: int) -> Found:
    """Look for the program on this node. Blocking: a volume may be slow."""
    problem = _problem(find, node)
    return Found(find.id, problem, "" if problem else _digest(Path(find.folder) / find.command[0]))


def _problem(find: Find, node: int) -> str:
    folder, first = Path(find.folder), find.command[0]
    if not os.path.isdir(folder):  # noqa: PTH112
        return f"node {node} has no folder {folder}: run it from one that every node has, such as /workspace"
    if first == MODULE:
        return "" if len(find.command) > 1 else "-m needs the name of a module"
    path = folder / first
    if is_script(first) and not os.path.isfile(path):  # noqa: PTH113
        return f"node {node} has no {path}: `lockstep sync` sends your workspace to every node"
    if is_script(first):
        return "" if os.access(path, os.R_OK) else f"{path} on node {node} is not readable: `chmod a+r` it"
    problem = program_problem(argv(Asked("", find.command, find.folder, ""))[0], find.folder, os.environ)
    return problem and f"node {node}: {problem}"


def program_fact(command: Sequence[str], folder: str) -> ProgramFact | None:
    """Return what is known of the file that ranks run. None: the command names none that is a program. Blocking, too."""
    path = next(_files_of(command, folder, {}), None)
    if path is None or not (command[0].startswith(".") or path.suffix in (".py", ".sh") or shebang(path)[0]):
        return None
    senders = tuple(sender[:300] for sender in Senders().of(os.path.realpath(path))[:8])
    digest = _digest(path)
    return ProgramFact(os.path.normpath(path), digest, senders) if digest else None


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(read_regular(path, DIGEST_BYTES_MAX, follow=True)).hexdigest()
    except OSError:
        return ""


def file_elsewhere(run: Run, lines: Sequence[str]) -> str:
    """Return where a file or a package is that a rank's last lines miss, if that is beside the script or in a folder above, and the fields
    that lead there.

    Blocking: a volume may be slow.
    """
    missing = next((match for line in reversed(lines) if (match := _MISSING.search(line))), None)
    if missing is None or run.interactive is not None:
        return ""
    folder, root, file = Path(run.working_directory), Path(run.run_dir).parent.parent, missing["file"]
    script = next((path for word in run.command[:3] if is_script(word) and os.path.isfile(path := folder / word)), None)  # noqa: PTH113
    beside = [] if script is None else [script.parent]
    searched, names = (folder, (file,)) if file else ([*beside, folder][0], (missing["package"], f"{missing['package']}.py"))
    places = (*beside, *(above for low in (*beside, searched) for above in (low, *low.parents) if above.is_relative_to(root)))
    place = next((place for place in places if any(os.path.exists(place / name) for name in names)), searched)  # noqa: PTH110 (it raises for no name)
    if place == searched:
        return ""  # it is nowhere near, or is there: the script changes its folder, or its modules
    of_job, of_script = (
        ("/workspace" / path.relative_to(root) if path.is_relative_to(root) else path) for path in (place, script or place)
    )
    part = of_script.relative_to(of_job) if of_script.is_relative_to(of_job) else of_script
    field = f", script.path: {part}" if file else f", script.module: {'.'.join(part.with_suffix('').parts)}"
    not_here = f"not in {folder}, where ranks work" if file else "where Python doesn't search"
    return f"{names[0]} is in {place}, {not_here}: state script.folder: {of_job}{field if script else ''}"[:600]
