"""JupyterLab and debugpy for pods of the embedded cluster, whose image lacks them: installed once beside the packages that pods mount."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SETUP = Path(__file__).resolve().parent.parent / "scripts/setup.py"
MOUNTED = "/opt/lockstep"


def python_path() -> str:
    """PYTHONPATH of a pod that has them too. The trainer's image installs the same lock file."""
    spec = importlib.util.spec_from_file_location("lockstep_setup", SETUP)
    assert spec is not None and spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    home = setup.packages("editors", setup.cache_root())
    editors = setup.site_packages(Path(MOUNTED) / home.name)
    return f"{MOUNTED}/code:{editors}:{MOUNTED}/site"
