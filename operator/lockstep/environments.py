"""Python environments in the cache: the packages of a lock, installed once, and thin environments that have this code before them.

The packages (6 GB, most of it torch) lie in a folder named by a hash of the lock and the interpreter, so a fresh clone needs a second, not
minutes. Standard library only, because `make setup` runs it before anything is installed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lockstep.api.errors import ConfigError, Failed
from lockstep.assets import PACKAGE, PACKAGES, asset, package

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
"""Programs of a thin environment where it has their packages: what the Makefile calls, and the launchers that people's scripts call in a
job on this machine.
"""
REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
"""Errors of a folder that another user owns, that is read-only, or that has no room."""
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a file system that can't lock files, as some NFS servers."""
_SIZES = re.compile(r"^# To fetch: (\d+) MB; on disk: (\d+) MB", re.MULTILINE)
Say = Callable[[str], None]


class NoHome(ConfigError):
    """The user has no home folder, and no variable names another."""


def cache_root() -> Path:
    """Return the folder of what is costly to make again: $LOCKSTEP_CACHE, else lockstep/ in the user's cache folder. Raises NoHome."""
    own, base = os.environ.get("LOCKSTEP_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(own).absolute() if own else (Path(base) if base else Path.home() / ".cache") / "lockstep"
    except RuntimeError:
        raise NoHome("this user has no home folder for packages and other caches: name a folder by $LOCKSTEP_CACHE") from None


def environment_key(lock: Path) -> str:
    """Return a hash of everything that changes what gets installed: the locked packages, the interpreter and the platform."""
    digest = hashlib.sha256(b"".join(line for line in lock.read_bytes().splitlines(keepends=True) if not line.startswith(b"#")))
    digest.update(f"{sys.version}|{sysconfig.get_platform()}|{os.path.realpath(sys.executable)}".encode())
    return digest.hexdigest()[:16]


def packages(name: str, cache: Path, say: Say, **variables: str) -> Path:
    """Return the cached environment of `requirements/<name>.lock`, made if it isn't there; bytecode is compiled at install. `variables`: of
    the environment where packages are built that have no wheel, with what the lock has for that.

    Raises:
        Failed: the disk has no room, the cache can't be used, or the packages can't be fetched.
    """
    lock = asset(f"requirements/{name}.lock")
    return made(cache / "python" / environment_key(lock), cache, say, lambda draft: _install(lock, draft, cache, say, variables))


def made(home: Path, cache: Path, say: Say, make: Callable[[Path], None]) -> Path:
    """Return a folder of the cache; where it isn't whole, one process at a time makes it. Raises Failed."""
    with _usable(cache, *REFUSALS):
        if not is_whole(home):
            with alone(cache, say) as is_alone:
                if not is_whole(home):
                    for draft in home.parent.glob(f".{home.name}.*") if is_alone else ():
                        shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
                    with _draft(home) as draft:
                        make(draft)
    return home


def is_whole(home: Path, *parts: str) -> bool:
    return all((home / part).exists() for part in ("done", *parts))


def _install(lock: Path, draft: Path, cache: Path, say: Say, variables: Mapping[str, str]) -> None:
    _check_room(lock, draft.parent, say)
    uv = installer(cache)
    # No home, or one with a small quota, is a reason to name a cache: uv's own is there, too. Elsewhere it is the user's, whose files are
    # linked.
    own = {"UV_CACHE_DIR": str(cache / "uv")} if os.environ.get("LOCKSTEP_CACHE") and not os.environ.get("UV_CACHE_DIR") else {}
    run(uv, "venv", "--quiet", "--relocatable", "--python", sys.executable, str(draft), **own)
    run(
        uv, "pip", "install", "--require-hashes", "--no-deps", "--compile-bytecode", "--link-mode", "hardlink",
        "--python", str(draft / "bin" / "python"), "-r", str(lock), "--build-constraints", str(lock),
        UV_HTTP_TIMEOUT="300", **own, **variables,
    )  # fmt: skip


def _check_room(lock: Path, folder: Path, say: Say) -> None:
    """Say what is fetched and where to. Raises Failed where that has no room."""
    sizes, room = _SIZES.search(lock.read_text(encoding="utf-8")), shutil.disk_usage(folder).free
    fetched, taken = (int(size) * 10**6 for size in sizes.groups()) if sizes else (0, 0)
    fetch, take, left = (f"{size / 1e9:.1f} GB" for size in (fetched, taken, room))
    if taken > room:
        raise Failed(
            f"the packages of {lock.name} take {take}, and {folder} has {left} left: make room, or name a folder on another disk by"
            " $LOCKSTEP_CACHE"
        )
    amount = f" (fetches up to {fetch}, takes {take} of {left})" if sizes else ""
    say(f"installing the packages of {lock.name} into {folder}{amount}")


@contextmanager
def _usable(cache: Path, *errors: int) -> Iterator[None]:
    """Raise Failed instead of an OSError of these numbers, or of any if none is given: the cache can't be used."""
    try:
        yield
    except OSError as error:
        if errors and error.errno not in errors:
            raise
        raise Failed(f"{cache}, which keeps packages, can't be used ({error.strerror}): name another folder by $LOCKSTEP_CACHE") from error


@contextmanager
def alone(cache: Path, say: Say) -> Iterator[bool]:
    """Hold the lock of the cache's environments, and give False where its file system has none. Raises Failed for a folder that can't be
    written.
    """
    with ExitStack() as stack:
        with _usable(cache):
            cache.mkdir(parents=True, exist_ok=True)
            is_alone = _lock(stack.enter_context((cache / "packages.lock").open("w")).fileno(), cache, say)
        with _usable(cache, *REFUSALS):
            yield is_alone


def _lock(descriptor: int, cache: Path, say: Say) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say(f"another process installs packages into {cache}: waiting until it has ended")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        say(f"files in {cache} can't be locked ({error.strerror}): going on without, beside others that may install the same")
        return False
    return True


@contextmanager
def _draft(home: Path, *parts: str) -> Iterator[Path]:
    """Give a folder to make an environment in, which becomes `home` when it is whole, unless another process was faster. `parts`: files
    that a whole one has.
    """
    home.parent.mkdir(parents=True, exist_ok=True)
    draft = home.with_name(f".{home.name}.{os.urandom(4).hex()}")
    try:
        yield draft
        (draft / "done").touch()
        if home.exists() and not is_whole(home, *parts):
            shutil.rmtree(home)  # half made by an earlier version
        try:
            draft.rename(home)
        except OSError:
            if not is_whole(home, *parts):
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def run(*command: str, **environment: str) -> None:
    """Run a program, whose words are shown as they come. Raises Failed if it fails."""
    code = subprocess.run(command, check=False, env={**os.environ, **environment}).returncode
    if code:
        name = " ".join([Path(command[0]).name, *command[1:3]])
        raise Failed(
            f"`{name} …` ended with exit code {code}; what it lacked is above, and the same command goes on from there. Behind a proxy with"
            " certificates of its own: export SSL_CERT_FILE=/path/to/ca.pem"
        )


def installer(cache: Path) -> str:
    """Return the path of uv, installed by pip from a hashed lock: it fetches in parallel, which saves minutes of torch's 5 GB. Raises
    ConfigError, Failed.
    """
    lock = asset("requirements/bootstrap.lock")
    home = cache / "bootstrap" / environment_key(lock)
    with _usable(cache, *REFUSALS):
        if not is_whole(home, "bin/uv"):
            if importlib.util.find_spec("ensurepip") is None:
                raise ConfigError(f"{sys.executable} has no ensurepip, which makes virtual environments: apt-get install python3-venv")
            with _draft(home, "bin/uv") as draft:
                run(sys.executable, "-m", "venv", str(draft))
                run(str(draft / "bin" / "python"), "-m", "pip", "install", "--quiet", "--require-hashes", "-r", str(lock))
    return str(home / "bin" / "uv")


def site_packages(home: Path) -> Path:
    return home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def thin_venv(target: Path, home: Path, sources: Sequence[Path], place: Path | None = None) -> None:
    """Make an environment of folders of code, then the cached packages, with scripts for the programs among them. `place`: where it is
    moved to, if it is.
    """
    stale = (target / "packages").is_symlink() and (target / "packages").readlink() != home
    venv.EnvBuilder(with_pip=False, clear=stale, symlinks=True).create(target)
    (site_packages(target) / "lockstep-checkout.pth").write_text("".join(f"{path}\n" for path in [*sources, site_packages(home)]))
    for name, entry in CONSOLE_SCRIPTS.items():
        module, function = entry.split(":")
        top, script = module.partition(".")[0], target / "bin" / name
        if top in PACKAGES or (site_packages(home) / top).exists():
            script.write_text(f"#!{place or target}/bin/python\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
            script.chmod(0o755)
    links = {f"bin/{name}": home / "bin" / name for name in ("ruff", "ninja")} | {"packages": home}
    for name, source in links.items():
        if source.exists() and not (target / name).is_symlink():
            (target / name).symlink_to(source)


def full_environment(say: Say) -> Path:
    """Return the interpreter of an environment with this code, the trainer's packages and the operator's, made if it isn't there.

    Of the folder where this code lies it has the four packages alone, as links: what else is installed there would come before what the
    lock pins. Raises Failed and ConfigError.
    """
    cache = cache_root()
    home = packages("local", cache, say)
    target = cache / "full" / f"{home.name}-{hashlib.sha256(str(PACKAGE.resolve()).encode()).hexdigest()[:8]}"

    def make(draft: Path) -> None:
        (draft / "code").mkdir(parents=True)
        for name in PACKAGES:
            (draft / "code" / name).symlink_to(package(name))
        thin_venv(draft, home, [target / "code"], target)
        for script in (draft / "bin").glob("[aA]ctivate*"):  # for a person's shell, with the draft's path
            script.unlink()

    return made(target, cache, say, make) / "bin" / "python"


def point(link: Path, target: Path | str) -> None:
    """Let a link point to `target`, at once; one that does is left as it is."""
    if link.is_symlink() and str(link.readlink()) == str(target):
        return
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.symlink_to(target)
    temporary.replace(link)
