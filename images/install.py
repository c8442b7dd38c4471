"""Put packages of the checkout into an image: python3 install.py PYPROJECT TARGET FOLDER...

TARGET is laid over the image's virtual environment. Not `pip install .`: it would fetch a build backend that no lock pins by a hash,
and what it adds to a copy of the files is the folder that says which version they are.
"""

from __future__ import annotations

import compileall
import py_compile
import shutil
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any


def site_packages(target: Path) -> Path:
    return target / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"


def install(project: dict[str, Any], target: Path, folders: list[Path]) -> None:
    """Copy `folders`, compiled, with the project's name and version."""
    site = site_packages(target)
    for folder in folders:
        shutil.copytree(folder, site / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    metadata = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (metadata / "INSTALLER").write_text("lockstep\n")
    # Compiled now, because the root is read-only later, and by hashes, because a build may set the sources' times.
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(site, quiet=1, stripdir=str(target), prependdir="/opt/venv", invalidation_mode=unchecked)


def main() -> int:
    pyproject, target, *folders = (Path(argument) for argument in sys.argv[1:])
    install(tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"], target, folders)
    return 0


if __name__ == "__main__":
    sys.exit(main())
