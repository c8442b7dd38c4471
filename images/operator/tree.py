"""Copy a virtual environment and what it needs of the base, and nothing else, into a folder: python3 tree.py TARGET VENV

The last stage of the image begins with nothing and has this folder: no shell, no package manager. What it needs is asked of the base's own
Python and dynamic loader, so that it holds for Debian's, Ubuntu's and Red Hat's.
"""

from __future__ import annotations

import compileall
import ctypes
import os
import py_compile
import re
import ssl
import subprocess
import sys
import sysconfig
import zoneinfo
from collections.abc import Iterator
from pathlib import Path
from shutil import copyfile, copymode

UNUSED = {"__pycache__", "ensurepip", "idlelib", "lib2to3", "test", "tkinter", "turtledemo"}
"""Folders of the standard library that the operator doesn't import. Packages of the base's own Python are not the environment's, either."""
LOADED_LATER = ("libgcc_s.so.1",)
"""Libraries that libc opens by name: without this one, a thread that ends by pthread_exit ends the process."""
FILES = ("/etc/ld.so.cache", "/etc/nsswitch.conf", "/etc/os-release", "/etc/localtime", "/etc/crypto-policies", "/usr/share/licenses")


class Tree:
    """A folder that gets files of the machine under their own paths, with every symbolic link on the way."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def add(self, path: Path) -> None:
        """Add a file, or a folder with all that is in it; nothing if it isn't there."""
        for file in files(path):
            self._add(file)

    def _add(self, path: Path) -> None:
        here = Path("/")
        for number, part in enumerate(path.parts[1:], 2):
            here /= part
            copy = self.target / here.relative_to("/")
            if here.is_symlink():
                if not copy.is_symlink():
                    copy.symlink_to(here.readlink())
                self.add(Path(os.path.normpath(here.parent / here.readlink()), *path.parts[number:]))
                return
            if here.is_dir():
                copy.mkdir(exist_ok=True)
            elif not copy.exists():
                copyfile(here, copy)
                copymode(here, copy)  # neither times nor extended attributes


def files(path: Path) -> Iterator[Path]:
    """Return a file itself, or all files and links below a folder, but for UNUSED."""
    if not path.is_dir() or path.is_symlink():
        yield from [path] if os.path.lexists(path) else []
        return
    for folder, folders, names in os.walk(path):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        folders[:] = sorted({*folders} - {*links} - UNUSED)
        yield from (Path(folder, name) for name in sorted([*names, *links]))


def loaded(name: str) -> list[Path]:
    """Return paths of files that this process has mapped, by the begin of their names."""
    paths = dict.fromkeys(re.findall(r"(/\S+)$", Path("/proc/self/maps").read_text(), re.MULTILINE))
    return [Path(path) for path in paths if Path(path).name.startswith(name)]


def libraries(program: Path, loader: Path) -> set[Path]:
    """Return the shared libraries that the dynamic loader finds for a program or a library. Raises ValueError for one that it doesn't."""
    lines = subprocess.run([str(loader), "--list", str(program)], capture_output=True, text=True, check=False).stdout
    if "not found" in lines:
        raise ValueError(f"{program} needs a library that the base doesn't have: {lines.strip()}")
    return {Path(os.path.normpath(path)) for path in re.findall(r"(/\S+)", lines)}


def standard_library() -> list[Path]:
    """Return what is in the folder of the base's standard library, without its packages."""
    leave = {*UNUSED, "site-packages", "dist-packages"}
    return [path for path in sorted(Path(sysconfig.get_path("stdlib")).iterdir()) if path.name not in leave]


def trust() -> list[Path]:
    """Return where OpenSSL looks for certificates, its settings and its modules."""
    paths = ssl.get_default_verify_paths()
    settings = Path(paths.openssl_cafile).parent
    modules = [library.parent / "ossl-modules" for library in loaded("libcrypto")]
    return [
        Path(paths.openssl_cafile),
        Path(paths.openssl_capath),
        *(settings / name for name in ("openssl.cnf", "fips_local.cnf", "openssl.d")),
        *modules,
    ]


def fill(target: Path, environment: Path) -> None:
    """Put the environment and all that it needs into `target`. Raises ValueError."""
    target.mkdir()
    tree, [loader, *_] = Tree(target), loaded("ld-")
    for name in LOADED_LATER:
        ctypes.CDLL(name)
    code = [*standard_library(), environment / "lib", environment / "lib64", environment / "pyvenv.cfg"]
    programs = sorted((environment / "bin").glob("python*"))
    licenses = sorted(Path("/usr/share/doc").glob("*/copyright"))
    for path in [*code, *programs, *trust(), *licenses, *map(Path, zoneinfo.TZPATH), *map(Path, FILES)]:
        tree.add(path)
    for name in LOADED_LATER:
        tree.add(loaded(name)[0])
    binaries = [programs[0].resolve(), *(file for path in code for file in files(path) if ".so" in file.suffixes)]
    for path in sorted(set().union(*(libraries(binary, loader) for binary in binaries))):
        tree.add(path)
    (target / "tmp").mkdir(exist_ok=True)
    (target / "tmp").chmod(0o1777)


def main() -> int:
    target, environment = (Path(argument) for argument in sys.argv[1:])
    fill(target, environment)
    # Compiled now, because the root is read-only later, and by hashes, because a build may set the sources' times.
    compileall.compile_dir(
        target, quiet=1, stripdir=str(target), prependdir="/", invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
