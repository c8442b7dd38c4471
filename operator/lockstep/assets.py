"""What ships beside the code: manifests, locks, templates, samples and recipes of images. A wheel has it as package data, in the folders of a checkout."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

PACKAGE = Path(str(files("lockstep")))
"""Folder of this package."""
_PACKED = PACKAGE / "assets"


def asset(path: str) -> Path:
    """Return the place of a file or folder that ships with this code, by its path in a checkout: `manifests/crds`."""
    return (_PACKED if _PACKED.is_dir() else PACKAGE.resolve().parents[1]) / path
