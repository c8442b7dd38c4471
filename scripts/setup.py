"""Make `.venv`: python3 scripts/setup.py [--extra dev]; or install the editors of the embedded cluster's pods: --extra editors

The third-party packages (6 GB, most of it torch) live in a cache folder keyed by a hash of the lock file and the interpreter, so
a fresh clone needs a second, not minutes. `.venv` itself is thin: this checkout first, the cached packages after it. Standard
library only, because it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import compileall
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
SOURCE_ROOTS = ("operator", "workspace")
CONSOLE_SCRIPTS = {
    "lockstep": "lockstep.cli.main:main",
    "kubectl-lockstep": "lockstep.cli.main:main",
    "pytest": "pytest:main",
    "mypy": "mypy.__main__:console_entry",
    "lint-imports": "importlinter.cli:lint_imports_command",
    "torchrun": "torch.distributed.run:main",
    "accelerate": "accelerate.commands.accelerate_cli:main",
    "deepspeed": "deepspeed.launcher.runner:main",
}
"""Programs of .venv/bin: what the Makefile calls, and the launchers that people's shell scripts call in a job on this machine."""


def cache_root() -> Path:
    """Folder of what is costly to make again: $LOCKSTEP_CACHE, else the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    own = os.environ.get("LOCKSTEP_CACHE")
    return Path(own) if own else (Path(base) if base else Path.home() / ".cache") / "lockstep"


def environment_key(lock: Path) -> str:
    """Everything that changes what gets installed: the locked packages, the interpreter and the platform."""
    digest = hashlib.sha256(lock.read_bytes())
    digest.update(f"{sys.version}|{sysconfig.get_platform()}|{os.path.realpath(sys.executable)}".encode())
    return digest.hexdigest()[:16]


def run(*command: str, **environment: str) -> None:
    """Run a program, whose words are shown as they come. Ends this one if it fails."""
    code = subprocess.run(command, check=False, env={**os.environ, **environment}).returncode
    if code:
        name = " ".join([Path(command[0]).name, *command[1:3]])
        sys.exit(
            f"setup: `{name} …` ended with exit code {code}; what it lacked is above. Behind a proxy with certificates of its own: SSL_CERT_FILE=/path/to/ca.pem make …"
        )


def installer(cache: Path) -> Path:
    """uv, installed by pip from a hashed lock: it fetches in parallel, which saves minutes of torch's 5 GB."""
    lock = REQUIREMENTS / "bootstrap.lock"
    home = cache / "bootstrap" / environment_key(lock)
    if not (home / "done").exists():
        venv.EnvBuilder(with_pip=True, clear=True).create(home)
        run(str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--require-hashes", "-r", str(lock))
        (home / "done").touch()
    return home / "bin" / "uv"


def packages(extra: str, cache: Path) -> Path:
    """The cached environment of `requirements/<extra>.lock`, made if it isn't there; bytecode is compiled at install."""
    lock = REQUIREMENTS / f"{extra}.lock"
    home = cache / "python" / environment_key(lock)
    if (home / "done").exists():
        return home
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "packages.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # two checkouts may be set up at once
        if not (home / "done").exists():
            _install(lock, home, cache)
    return home


def _install(lock: Path, home: Path, cache: Path) -> None:
    print(f"setup: installing the packages of {lock.relative_to(ROOT)} into {home}", flush=True)
    uv = str(installer(cache))
    shutil.rmtree(home, ignore_errors=True)
    run(uv, "venv", "--quiet", "--python", sys.executable, str(home))
    run(  # hardlinks to what uv keeps of its downloads: 6 GB lie there once
        uv, "pip", "install", "--quiet", "--require-hashes", "--no-deps", "--compile-bytecode", "--link-mode", "hardlink",
        "--python", str(home / "bin" / "python"), "-r", str(lock),
        UV_HTTP_TIMEOUT="300",
    )  # fmt: skip
    (home / "done").touch()


def site_packages(home: Path) -> Path:
    return home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def thin_venv(target: Path, home: Path) -> None:
    """`.venv`: this checkout's source roots, then the cached packages; scripts for the tools the Makefile calls."""
    stale = (target / "packages").is_symlink() and (target / "packages").readlink() != home
    venv.EnvBuilder(with_pip=False, clear=stale, symlinks=True).create(target)
    paths = [str(ROOT / root) for root in SOURCE_ROOTS] + [str(site_packages(home))]
    (site_packages(target) / "lockstep-checkout.pth").write_text("\n".join(paths) + "\n")
    for name, entry in CONSOLE_SCRIPTS.items():
        module, function = entry.split(":")
        script = target / "bin" / name
        script.write_text(f"#!{target}/bin/python\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
        script.chmod(0o755)
    links = {f"bin/{name}": home / "bin" / name for name in ("ruff", "ninja")} | {"packages": home}
    for name, source in links.items():
        if source.exists() and not (target / name).is_symlink():
            (target / name).symlink_to(source)


def publish_editors(cache: Path) -> Path:
    """JupyterLab and debugpy where pods of the embedded cluster find them: editors/lib/python/site-packages in the volume that they mount.

    The volume is the cache's folder python/. JupyterLab looks for its pages in share/ beside lib/.
    """
    home = packages("editors", cache)
    point(home.parent / "editors", home.name)
    point(home / "lib" / "python", site_packages(home).parent.name)
    return home


def point(link: Path, target: str) -> None:
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.symlink_to(target)
    temporary.replace(link)


def missing() -> str | None:
    """The first thing that this interpreter lacks, in one sentence; None when it will do."""
    if sys.version_info < (3, 11):
        return f"{sys.executable} is Python {sys.version.split()[0]}; Lockstep needs 3.11 or newer: make setup PYTHON=/path/to/python3.11"
    if importlib.util.find_spec("ensurepip") is None:
        return f"{sys.executable} has no ensurepip, which makes virtual environments: apt-get install python3-venv"
    return None


def editors(cache: Path) -> int:
    """Install them for the pods of the embedded cluster; without a code-server where none can be made."""
    import codeserver

    with (cache / "editors.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        home = publish_editors(cache)
        print(f"setup: pods of the embedded cluster find jupyterlab and debugpy ({home})", flush=True)
        try:
            print(f"setup: and code-server ({codeserver.publish(cache, home)})")
        except codeserver.NoCodeServerError as error:
            print(f"setup: but no code-server, which lockstep vscode would use there: {error}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--extra", default="dev", choices=["dev", "operator", "train", "cli", "editors"], help="which lock file to install (default: dev)"
    )
    extra = parser.parse_args().extra
    if problem := missing():
        print(f"setup: {problem}", file=sys.stderr)
        return 2
    cache = cache_root()
    cache.mkdir(parents=True, exist_ok=True)
    if extra == "editors":
        return editors(cache)
    home = packages(extra, cache)
    thin_venv(ROOT / ".venv", home)
    for root in SOURCE_ROOTS:
        compileall.compile_dir(ROOT / root, quiet=1)
    print(f"setup: .venv is ready ({home})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
