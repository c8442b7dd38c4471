"""Kind of a data file by its name, and its bytes, whatever it is compressed with."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

from lockstep_train.base.errors import first_line

JSON = {".jsonl", ".json", ".ndjson"}
PARQUET = ".parquet"
ARROW = {".arrow", ".feather"}
TABLES = {PARQUET, *ARROW, ".csv", ".tsv"}
TEXT = ".txt"
ARCHIVES = {".zip", ".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tzst", ".7z", ".rar"}
"""Files that hold others, whose bytes would pass for text."""


def _zstd(path: Path) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.OSFile(str(path), "rb"), "zstd")


DECOMPRESSORS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zstd}


def suffix_of(path: PurePath) -> str:
    """Suffix of the content's name, in lower case, whatever it is compressed with: .jsonl of data.jsonl.gz."""
    name = path.with_suffix("") if is_compressed(path) else path
    return name.suffix.casefold()


def is_compressed(path: PurePath) -> bool:
    """Return True for a compressed file, by its name."""
    return path.suffix.casefold() in DECOMPRESSORS


def open_data(path: Path) -> io.BufferedReader:
    """The file's bytes, decompressed where its name says that they are compressed. It and reading from it raise OSError."""
    decompress = DECOMPRESSORS.get(path.suffix.casefold())
    if decompress is None:
        return path.open("rb")
    return io.BufferedReader(_Decompressed(path, decompress(path)), 1 << 20)


class _Decompressed(io.RawIOBase):
    """Decompressed file that raises OSError where it is cut off or isn't compressed: the libraries have four words for that."""

    def __init__(self, path: Path, content: Any) -> None:
        self._path = path
        self._content = content

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return int(self._content.readinto(buffer))
        except (EOFError, zlib.error, lzma.LZMAError) as error:
            raise self._damaged(error) from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise self._damaged(error) from error

    def close(self) -> None:
        self._content.close()
        super().close()

    def _damaged(self, error: Exception) -> OSError:
        reason = f"its compressed content is cut off or damaged ({first_line(error)})"
        return OSError(errno.EINVAL, reason, str(self._path))
