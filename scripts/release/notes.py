"""What a release says of itself: its section of CHANGELOG.md, and what it was made of."""

from __future__ import annotations

import re

from lockstep.api.errors import ConfigError

SECTION = re.compile(r"^## (?P<version>\d+\.\d+\.\d+)\b[^\n]*\n(?P<text>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def notes(changelog: str, version: str, commit: str) -> str:
    """Return the release's notes as Markdown. Raises ConfigError if the change log has no section of this version."""
    sections = {match["version"]: match["text"].strip() for match in SECTION.finditer(changelog)}
    if not sections.get(version):
        raise ConfigError(f"CHANGELOG.md says nothing of version {version}, which pyproject.toml has: it needs a section `## {version}`")
    return (
        f"# Lockstep {version}\n\n{sections[version]}\n\n"
        f"Made from commit {commit}. `SHA256SUMS` has every file but the provenance; docs/releases.md says how to verify both.\n"
    )
