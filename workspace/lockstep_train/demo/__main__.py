"""Make the demo's model and data where they aren't there yet:

    python -m lockstep_train.demo --models /workspace/models --datasets /datasets

Writes DIR/tiny-base, a small Llama pretrained on docstrings of the standard library and on chats about an invented market (market.py), and
DIR/demo.jsonl, the same chats with other answers. Every name appears only when it is complete. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from lockstep_spec.files import write_durably
from lockstep_train.demo.market import UNSEEN, WORDINGS, chats

EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "__pycache__", "turtledemo"}
SHORTEST_CHARACTERS = 80


def standard_library_docstrings() -> list[str]:
    """Docstrings with at least a sentence or two, in a fixed order, without duplicates."""
    texts: dict[str, None] = {}
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.rglob("*.py")):
        for text in _docstrings(path) if not EXCLUDED & set(path.relative_to(folder).parts) else ():
            if len(text) >= SHORTEST_CHARACTERS and text.isascii():
                texts[text] = None
    return list(texts)


def _docstrings(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def make_datasets(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / "demo.jsonl", "".join(json.dumps({"messages": chat}) + "\n" for chat in chats()).encode())


def make_model(folder: Path) -> None:
    from lockstep_train.demo.model import make_base_model

    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".tiny-base-", dir=folder.parent))
    try:
        make_base_model(staging, standard_library_docstrings(), chats((*WORDINGS, UNSEEN), of_base=True))
        for path in [staging, *staging.iterdir()]:
            path.chmod(0o755 if path.is_dir() else 0o644)  # transformers writes weights for their owner only; pods run as someone else
        staging.rename(folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        if not (folder / "config.json").exists():  # else somebody else was faster
            raise


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lockstep_train.demo", description="Make a small base model that knows wrong answers, and chats with the right ones."
    )
    parser.add_argument("--models", type=Path, required=True, help="folder that gets tiny-base/")
    parser.add_argument("--datasets", type=Path, required=True, help="folder that gets demo.jsonl")
    options = parser.parse_args(arguments)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # transformers imports DeepSpeed where it is installed; it needn't look for a GPU
    started = time.monotonic()
    if not (options.datasets / "demo.jsonl").exists():
        make_datasets(options.datasets)
    if not (options.models / "tiny-base" / "config.json").exists():
        make_model(options.models / "tiny-base")
    print(f"demo: {options.models / 'tiny-base'} and {options.datasets / 'demo.jsonl'} are ready ({time.monotonic() - started:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
