"""Kind of a data file by its name, and its bytes, whatever it is compressed with."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

from lockstep_train.base.cache import LFS_POINTER, NO_POINTER
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


MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"BZh": ".bz2", b"\xfd7zXZ\0": ".xz", b"PAR1": PARQUET, b"ARROW1": ".arrow"}
"""First bytes of files → the suffix by which they are read."""
DISGUISES = {
    LFS_POINTER: NO_POINTER,
    b"PK\x03\x04": "is a zip archive (so are workbooks of Excel): unpack it, or save the table as CSV",
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff"), "is UTF-16: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"),
}
"""First bytes of files that aren't read → what they are, and what to do."""
WEB_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype\s+html|html)\b", re.IGNORECASE)


def disguise(path: PurePath, head: bytes) -> str | None:
    """Say what a data file is by its first bytes, where its name says otherwise."""
    own = next((suffix for magic, suffix in MAGIC.items() if head.startswith(magic)), None)
    if own is not None and path.suffix.casefold() not in {own, ".feather"}:
        return f"has the content of a {own} file: name it so that it ends with {own}"
    if WEB_PAGE.match(head) and suffix_of(path) in {*JSON, *TABLES}:
        return "is a web page: fetch the file itself (on a hub, the address with /resolve/ and not /blob/)"
    return next((words for magic, words in DISGUISES.items() if head.startswith(magic)), None)


def not_utf8(error: UnicodeDecodeError) -> str:
    """Reason why a text can't be read, and what its code page may be."""
    return (
        f"not UTF-8 (byte 0x{error.object[error.start]:02x}); convert the file to UTF-8, for example by iconv -f WINDOWS-1252 -t UTF-8, the"
        " code page of most western files from Windows and Excel (Chinese: GB18030)"
    )


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
