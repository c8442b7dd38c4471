"""Version of this command: two machines of one job must have the same."""

from __future__ import annotations

from pathlib import Path


def own_version() -> str:
    """Version of the installed package; of a checkout the one that it becomes, with its commit where git knows it."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("lockstep")
    except PackageNotFoundError:
        return _of_checkout()


def _of_checkout() -> str:
    import tomllib

    root = Path(__file__).resolve().parents[4]
    try:
        number = str(tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])
    except (OSError, KeyError, ValueError):
        return "from a checkout"
    commit = _commit(root)
    return f"{number} from a checkout{f' ({commit})' if commit else ''}"


def _commit(root: Path) -> str:
    """Commit that is checked out; "" where git doesn't know, or isn't there."""
    import subprocess

    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
