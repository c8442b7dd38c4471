"""Version of this command: two machines of one job must have the same."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]


def own_version() -> str:
    """Version of the installed package; of a checkout the one that it becomes, with its commit where git knows it."""
    number, is_installed = _number()
    if is_installed:
        return number
    if not number:
        return "from a checkout"
    commit = _commit(ROOT)
    return f"{number} from a checkout{f' ({commit})' if commit else ''}"


def own_number() -> str:
    """Version alone, without asking git."""
    return _number()[0] or "0"


def _number() -> tuple[str, bool]:
    """Return the version, and whether it is installed; of a checkout without one: ''."""
    import tomllib
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("lockstep"), True
    except PackageNotFoundError:
        pass
    try:
        return str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]), False
    except (OSError, KeyError, ValueError):
        return "", False


def _commit(root: Path) -> str:
    """Commit that is checked out; "" where git doesn't know, or isn't there."""
    import subprocess

    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
