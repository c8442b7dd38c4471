"""Target of a transfer: a file or folder below what a person named, reached without following a link that somebody has put there."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

from lockstep.platforms.inpod.entries import is_plain, shown
from lockstep_machine.wire import CarryError


class Destination:
    """The file or folder that is written, reached from the folder `base` that a person named. Below that, no link is ever followed: whoever
    made one there, and when. `close` it.
    """

    def __init__(self, base: Path, above: tuple[str, ...]) -> None:
        self.base, self._above = base, above
        self._root: int | None = None

    def close(self) -> None:
        if self._root is not None:
            os.close(self._root)
            self._root = None

    def path(self, name: str) -> Path:
        """Path of the entry, for messages, and for what is only read."""
        return self.base.joinpath(*self._parts(name))

    def _parts(self, name: str) -> list[str]:
        return [*self._above, *(name.split("/") if name else ())]

    def holder(self, name: str, *, make: bool = True) -> tuple[int, str]:
        """Open the folder that `name` is in (the caller closes it); return it and the last component.

        Raises CarryError; FileNotFoundError without `make`.
        """
        *above, last = self._parts(name)
        return self._opened(above, make), last

    def folder(self, name: str) -> int:
        """Open the folder, and create it if it is missing. Raises CarryError."""
        return self._opened(self._parts(name), make=True)

    def remove(self, name: str, how: Callable[..., None]) -> None:
        """Remove an entry by `os.unlink` or `os.rmdir`. Raises CarryError, OSError."""
        holder, last = self.holder(name, make=False)
        try:
            how(last, dir_fd=holder)
        finally:
            os.close(holder)

    def _opened(self, parts: list[str], make: bool) -> int:
        if self._root is None:
            if make:
                self.base.mkdir(parents=True, exist_ok=True)
            self._root = os.open(self.base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        here = os.dup(self._root)
        for number, part in enumerate(parts):
            try:
                below = _subfolder(here, part, make)
            except NotADirectoryError:
                where = self.base.joinpath(*parts[: number + 1])
                raise CarryError(
                    f"{where} is a link or a file where a folder has to be: following it could lead outside of the target"
                ) from None
            finally:
                os.close(here)
            here = below
        return here


def destination_of(to: str, name: object, *, folder: bool, allowed: Callable[[Path], bool]) -> Destination:
    """Destination of `name`: below a target that ends with a slash, a file in a folder that exists; else the target is its new name.

    Raises CarryError when `name` is used and is no name of a file, or `allowed` says no.
    """
    into = to.endswith(("/", "/.", "/..")) or to in (".", "..") or (not folder and Path(to).is_dir())
    if into:
        if not isinstance(name, str) or "/" in name or not is_plain(name):
            raise CarryError(
                f"the other end names it {shown(name)}, which is not a valid file name in {to}: name the new file or folder, too"
            )
        target = Destination(Path(to), (name,))
    elif folder:
        target = Destination(Path(to), ())
    else:
        target = Destination(Path(to).parent, (Path(to).name,))
    if not allowed(Path(os.path.realpath(target.base))):
        raise CarryError(f"{to} is outside of the job's volumes")
    return target


def _subfolder(above: int, name: str, make: bool) -> int:
    """Open a folder below another. Raises NotADirectoryError for a link, too."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        try:
            return os.open(name, flags, dir_fd=above)
        except FileNotFoundError:
            if not make:
                raise
        with contextlib.suppress(FileExistsError):  # (somebody else has made it meanwhile)
            os.mkdir(name, dir_fd=above)
        return os.open(name, flags, dir_fd=above)
    except OSError as error:
        if error.errno == errno.ELOOP:  # (what some systems say of a link, instead of ENOTDIR)
            raise NotADirectoryError(error.errno, error.strerror, name) from None
        raise
