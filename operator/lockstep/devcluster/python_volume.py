"""The Python environment that pods mount: the cached packages and a copy of this checkout's code."""

from __future__ import annotations

import compileall
import fcntl
import hashlib
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import lockstep
from lockstep.api.errors import ConfigError

CODE = "code"
SITE = "site"
KEPT_COPIES = 3


def source_folders() -> list[Path]:
    """The packages of this checkout (or installation): lockstep, lockstep_gang, lockstep_spec, lockstep_train."""
    control = Path(lockstep.__file__).resolve().parent
    checkout = control.parent.parent
    nodes = [checkout / "workspace" / name for name in ("lockstep_gang", "lockstep_spec", "lockstep_train")]
    return [control, *(folder if folder.is_dir() else control.parent / folder.name for folder in nodes)]


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)


def code_key() -> str:
    digest = hashlib.sha256()
    for folder in source_folders():
        for path in _files(folder):
            digest.update(f"{folder.name}/{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def publish_code(volume: Path) -> Path:
    """Copy the packages into the volume, compiled, and let `code` point at the copy. The copy is named by its content.

    One at a time: several clusters and deployments of this machine may want it at once.
    """
    return _publish(volume, f"{CODE}-{code_key()}", _compile)


def publish_links(volume: Path, code: Path) -> Path:
    """Publish a copy that another volume of the same disk has: its files stay here when they are removed there."""
    return _publish(volume, code.name, lambda draft: shutil.copytree(code, draft, copy_function=os.link))


def _publish(volume: Path, name: str, make: Callable[[Path], object]) -> Path:
    target = volume / name
    with (volume / ".publish.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            draft = volume / f".{name}.{os.getpid()}"
            make(draft)
            draft.rename(target)
        _point(volume / CODE, name)
        for old in sorted(volume.glob(f"{CODE}-*"), key=lambda p: p.stat().st_mtime)[:-KEPT_COPIES]:
            if old != target:
                shutil.rmtree(old)
    return target


def _compile(draft: Path) -> None:
    for folder in source_folders():
        shutil.copytree(folder, draft / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(draft, quiet=1, stripdir=str(draft))
    for path in [draft, *draft.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


def publish_packages(volume: Path) -> Path:
    """Let `site` point at the packages this interpreter runs with; they are part of the volume when scripts/setup.py made them.

    Raises:
        ConfigError: the packages lie elsewhere, so pods could not see them.
    """
    site = Path(_packages_of_torch())
    if not site.is_relative_to(volume.resolve()):
        raise ConfigError(
            f"the Python packages are in {site}, outside {volume}, where pods can't see them: use the .venv that `make setup` makes"
        )
    _point(volume / SITE, str(site.relative_to(volume.resolve())))
    return site


def _packages_of_torch() -> Path:
    import importlib.util

    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ConfigError(f"{sys.executable} has no torch, which pods of the embedded cluster take from here: make setup installs it")
    return Path(spec.origin).resolve().parent.parent


def _point(link: Path, target: str) -> None:
    if link.is_symlink() and str(link.readlink()) == target:
        return
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.symlink_to(target)
    temporary.replace(link)


def python_minor() -> str:
    return sysconfig.get_python_version()
