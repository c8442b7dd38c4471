"""JupyterLab and debugpy for pods of the embedded cluster, as `make editors` installs them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from lockstep.cli.shared.target import load

SETUP = Path(__file__).resolve().parents[3] / "scripts/setup.py"


def python_path() -> str:
    """PYTHONPATH of the pods of cluster `local`, in which they are found then. The trainer's image installs the same lock file."""
    spec = importlib.util.spec_from_file_location("lockstep_setup", SETUP)
    assert spec is not None and spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    setup.publish_editors(setup.cache_root())
    return next(variable.value for variable in load("local").profile.spec.pod.env if variable.name == "PYTHONPATH")
