"""Make `.venv`: python3 scripts/setup.py [--lock dev]; or install the editors of the embedded cluster's pods: --lock editors

Standard library only, because it runs before anything is installed; `lockstep.environments` does the work.
"""

from __future__ import annotations

import argparse
import compileall
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = (ROOT / "operator", ROOT / "workspace")
sys.path[:0] = map(str, SOURCE_ROOTS)


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def publish_editors(cache: Path) -> Path:
    """JupyterLab and debugpy where pods of the embedded cluster find them: editors/lib/python/site-packages in the volume that they mount.

    The volume is the cache's folder python/. JupyterLab looks for its pages in share/ beside lib/.
    """
    from lockstep.environments import packages, point, site_packages

    home = packages("editors", cache, say)
    point(home.parent / "editors", home.name)
    point(home / "lib" / "python", site_packages(home).parent.name)
    return home


def editors(cache: Path) -> None:
    """Install them for the pods of the embedded cluster; without a code-server where none can be made."""
    import codeserver
    from lockstep.environments import alone

    home = publish_editors(cache)
    with alone(cache, say):
        say(f"pods of the embedded cluster find jupyterlab and debugpy ({home})")
        try:
            say(f"and code-server ({codeserver.publish(cache, home)})")
        except codeserver.NoCodeServerError as error:
            say(f"but no code-server, which lockstep vscode would use there: {error}")


def setup(lock: str) -> None:
    """Install the packages of a lock. Raises LockstepError."""
    from lockstep.environments import cache_root, packages, thin_venv

    cache = cache_root()
    if lock == "editors":
        editors(cache)
        return
    home = packages(lock, cache, say)
    thin_venv(ROOT / ".venv", home, SOURCE_ROOTS)
    for root in SOURCE_ROOTS:
        compileall.compile_dir(root, quiet=1)
    say(f".venv is ready ({home})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lock", default="dev", choices=["dev", "editors"], help="which lock file to install (default: dev)")
    lock = parser.parse_args().lock
    if sys.version_info < (3, 11):
        version, way = sys.version.split()[0], "make setup PYTHON=/path/to/python3.11"
        print(f"setup: {sys.executable} is Python {version}; Lockstep needs 3.11 or newer: {way}", file=sys.stderr)
        return 2
    setup(lock)
    return 0


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Exit with the code that `main` returns; an error that a person can mend is one sentence."""
    from lockstep.api.errors import ConfigError, LockstepError

    try:
        code = main()
    except (LockstepError, OSError, subprocess.CalledProcessError) as error:
        print(f"{Path(sys.argv[0].removesuffix('/__main__.py')).stem}: {error}", file=sys.stderr)
        code = 2 if isinstance(error, ConfigError) else 1
    sys.exit(code)


if __name__ == "__main__":
    exit_with(main)
