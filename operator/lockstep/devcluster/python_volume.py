"""The Python environment that pods mount: the cached packages and a copy of Lockstep's own code."""

from __future__ import annotations

import compileall
import hashlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path

from lockstep.api.errors import ConfigError
from lockstep.assets import PACKAGES, package
from lockstep.devcluster.host.processes import locked
from lockstep.environments import point

CODE = "code"
SITE = "site"
KEPT_COPIES = 3


def source_folders() -> list[Path]:
    """Return the folders of Lockstep's own packages."""
    return [package(name) for name in PACKAGES]


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)


def code_key() -> str:
    digest = hashlib.sha256()
    for folder in source_folders():
        for path in _files(folder):
            digest.update(f"{folder.name}/{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def publish_code(volume: Path, shared: Path | None = None) -> Path:
    """Copy the packages into the volume, compiled, and let `code` point at the copy. The copy is named by its content.

    One at a time: several clusters and deployments of this machine may want it at once. `shared`: a volume of the same disk where it is
    compiled once for all; its files stay here when they are removed there.
    """
    compiled = publish_code(shared) if shared else None
    target = volume / (compiled.name if compiled else f"{CODE}-{code_key()}")
    with locked(volume / ".publish.lock"):
        if not target.exists():
            temporary = volume / f".{target.name}.{os.getpid()}"
            shutil.copytree(compiled, temporary, copy_function=os.link) if compiled else _compile(temporary)
            temporary.rename(target)
        point(volume / CODE, target.name)
        for old in sorted(volume.glob(f"{CODE}-*"), key=lambda p: p.stat().st_mtime)[:-KEPT_COPIES]:
            if old != target:
                shutil.rmtree(old)
    return target


def _compile(copy: Path) -> None:
    for folder in source_folders():
        shutil.copytree(folder, copy / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(copy, quiet=1, stripdir=str(copy))
    for path in [copy, *copy.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


def publish_packages(volume: Path) -> Path:
    """Let `site` point at the packages this interpreter runs with, which Lockstep installs into the volume. Raises ConfigError where pods
    couldn't see them.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"{sys.executable} has no torch, which pods of the embedded cluster take from here: run `lockstep quickstart`, or make setup in"
            " a clone"
        )
    site = Path(spec.origin).resolve().parent.parent
    if not site.is_relative_to(volume.resolve()):
        raise ConfigError(
            f"torch is in {site}, outside {volume}, where pods can't see it: install Lockstep into an environment without torch "
            "(uv tool install WHEEL), or use the .venv that `make setup` makes in a clone"
        )
    point(volume / SITE, str(site.relative_to(volume.resolve())))
    return site
