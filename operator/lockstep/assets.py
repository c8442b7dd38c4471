"""Files that ship beside the code: manifests, locks, templates, samples and recipes of images. A wheel has them as package data, in the
folders of a checkout.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

PACKAGE = Path(str(files("lockstep")))
"""Folder of this package."""
_PACKED = PACKAGE.resolve() / "assets"


def asset(path: str) -> Path:
    """Return the place of a file or folder that ships with this code, by its path in a checkout: `manifests/crds`."""
    return (_PACKED if _PACKED.is_dir() else PACKAGE.resolve().parents[1]) / path


PACKAGES = ("lockstep", "lockstep_gang", "lockstep_machine", "lockstep_spec", "lockstep_train")


def package(name: str) -> Path:
    """Return the folder of one of Lockstep's packages, which lie side by side in a wheel, without importing it."""
    beside = PACKAGE.resolve().parent / name
    return beside if beside.is_dir() else asset(f"workspace/{name}")
