"""Version of this command: two machines of one job must have the same."""

from __future__ import annotations

from pathlib import Path

from lockstep_spec import VERSION

ROOT = Path(__file__).resolve().parents[4]
"""Root of the checkout, if this is one."""


def own_version() -> str:
    """Return the version of the installed package; of a checkout the one that it becomes, with its commit where git knows it."""
    if not (ROOT / "pyproject.toml").is_file():
        return VERSION
    commit = _commit(ROOT)
    return f"{VERSION} from a checkout{f' ({commit})' if commit else ''}"


def _commit(root: Path) -> str:
    """Commit that is checked out; "" where git doesn't know, or isn't there."""
    import subprocess

    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
