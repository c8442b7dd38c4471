"""Folders of object stores (s3://, gs://, abfs://), through pyarrow's file systems.

pyarrow is there already, since datasets reads tables by it; s3fs would bring botocore, which contradicts other packages. The store has no
commits, so the pin is a digest over each object's path, size and ETag: another listing is another model.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lockstep_spec.modelnames import MODELS, holds_password
from lockstep_spec.words import any_of
from lockstep_train.base.cache import file_digest
from lockstep_train.base.errors import ConfigError, first_line
from lockstep_train.fetch.remote import ByteSink, MayPass, RemoteFile

SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss")
READERS = 16
CHUNK_BYTES = 8 << 20
_AWS = re.compile(r"AWS Error (\w+)(?: \(HTTP status (\d+)\))?")
_UNKNOWN = re.compile(r"ExceptionName: (\w+) Message: (.*?) \(Request")
"""Words that pyarrow leaves of an error that it doesn't know."""
_FINAL_STATUSES = frozenset({"301", "400", "401", "403", "404"})
_FINAL = any_of(
    r"NO_SUCH_BUCKET|NO_SUCH_KEY|RESOURCE_NOT_FOUND|does not exist|Bucket '[^']*' not found",
    r"INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|INVALID_CLIENT_TOKEN_ID|UNRECOGNIZED_CLIENT|MISSING_AUTHENTICATION_TOKEN",
    r"ACCESS_DENIED|[Pp]ermission denied|not valid for the object's",
    r"\b(403|404)\b",
)
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL come from the job's variables, by a Secret in envFrom"
)
_MIB = 1 << 20
PART_BYTES = (
    *(size * _MIB for size in (8, 5, 10, 15, 16, 20, 25, 32, 50, 64, 100, 128, 256, 512, 1024)),
    50_000_000,
    100_000_000,
)
"""Sizes of parts of uploads by aws, boto, rclone, MinIO and s5cmd. The ETag of such an object follows from it, and nobody tells it."""


class ObjectFolder:
    """Folder `address` of an object store, such as s3://bucket/models/Qwen3-8B."""

    def __init__(self, address: str, kind: str = MODELS) -> None:
        """Raise ConfigError for an address that holds a password, so that none gets into a message or a folder's name."""
        refuse_password(address)
        self.name = self._name = address.rstrip("/")
        self.kind = kind
        self._listings: dict[str, list[RemoteFile]] = {}
        self._unproven: dict[str, str] = {}

    def is_pin(self, revision: str | None) -> bool:
        return False

    def resolve(self, revision: str | None) -> str:
        if revision is not None:
            raise ConfigError(f"{self._name} has no revision {revision}: an object store has none; leave it out")
        listing = self._list()
        pin = hashlib.sha256("".join(f"{file.path}\0{file.size}\0{file.digest}\n" for file in listing).encode()).hexdigest()[:40]
        self._listings[pin] = listing
        return pin

    def files(self, pin: str) -> Sequence[RemoteFile]:
        if pin not in self._listings:
            now = self.resolve(None)
            if now != pin:
                raise ConfigError(
                    f"{self._name} was changed since this job first looked there: put the files back as they were, or start a new job,"
                    " which takes them as they are"
                )
        return self._listings[pin]

    def read(self, file: RemoteFile, pin: str, sink: ByteSink, start: int) -> None:
        with contextlib.closing(self._chunks(file, start)) as chunks:
            for chunk in chunks:
                sink.write(chunk)

    def _chunks(self, file: RemoteFile, start: int) -> Generator[bytes]:
        """Yield chunks. Its errors are the store's: those of whoever takes the chunks don't come by here."""
        system, root = self._system()
        try:
            with system.open_input_file(f"{root}/{file.path}") as stream:
                if _digest(stream.metadata()) != file.digest:
                    raise ConfigError(
                        f"{file.path} of {self._name} was changed while it was fetched; start again when nothing writes there"
                    )
                stream.seek(start)
                while chunk := stream.read(CHUNK_BYTES):
                    yield chunk
        except OSError as error:
            raise self._problem(error) from error

    def is_intact(self, file: RemoteFile, path: Path) -> bool:
        """Compare with the ETag where that is an MD5. Where it isn't one (encryption by a key service, an unknown size of parts), two equal
        reads are taken for right.
        """
        kind, _, tag = file.digest.partition(":")
        if kind != "etag" or not re.fullmatch(r"[0-9a-f]{32}(-[0-9]+)?", tag) or _is_etag(path, file.size, tag):
            return True
        digest = file_digest(path)
        if self._unproven.setdefault(file.path, digest) != digest:
            return False
        if (first := f"{file.path}\0") in self._unproven:
            print(f"{file.path} of {self._name} has an ETag that is no MD5 of it: two equal reads are taken for right", flush=True)
            return True
        self._unproven[first] = digest
        return False

    def _system(self) -> tuple[Any, str]:
        """pyarrow's file system and the folder in it. Raises ConfigError, MayPass."""
        from pyarrow import fs

        scheme, _, rest = self._name.partition("://")
        if scheme not in SCHEMES:
            raise ConfigError(f"{self._name} can't be fetched: addresses must begin with {', '.join(f'{name}://' for name in SCHEMES)}")
        # Stated like this, no other server is asked where the bucket is.
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        try:
            if scheme == "s3" and (endpoint or region):
                return fs.S3FileSystem(endpoint_override=endpoint, region=region or "us-east-1"), rest
            system, root = fs.FileSystem.from_uri(self._name)
        except ValueError as error:
            raise ConfigError(f"{self._name} is not a usable address: {first_line(error)}") from error
        except OSError as error:
            raise self._problem(error) from error
        return system, root

    def _list(self) -> list[RemoteFile]:
        system, root = self._system()
        try:
            with ThreadPoolExecutor(READERS) as pool:
                files = pool.map(lambda info: remote_file(system, root, info), self._infos(system, root))
                return sorted(files, key=lambda file: file.path)
        except OSError as error:
            raise self._problem(error) from error

    def _infos(self, system: Any, root: str) -> Sequence[Any]:
        """pyarrow's descriptions of the objects. Raises OSError."""
        from pyarrow import fs

        return [info for info in system.get_file_info(fs.FileSelector(root, recursive=True)) if info.is_file]

    def _problem(self, error: OSError) -> Exception:
        """Error to raise: ConfigError where only another address or another key helps."""
        if isinstance(error, FileNotFoundError):
            return ConfigError(f"{self._name} holds nothing; check the address, and that the key may list it: {_CREDENTIALS}")
        reason, final = _reason(error)
        if final:
            return ConfigError(f"{self._name} can't be read ({reason}); check the address, and that the key may read it: {_CREDENTIALS}")
        return MayPass(f"{self._name} can't be read: {reason}")


def refuse_password(address: str) -> None:
    """Raise ConfigError, which doesn't quote the address."""
    if holds_password(address):
        scheme = address.partition("://")[0]
        raise ConfigError(
            f"an address of {scheme}:// holds a password or a port (: or @ before its first /, or sig=); take it out: {_CREDENTIALS}"
        )


def _reason(error: OSError) -> tuple[str, bool]:
    """The store's words, and whether the same again would get the same answer."""
    text = str(error)
    code = _AWS.search(text)
    if code is None:
        return re.split(r"[.;] Detail|\(Request ID", first_line(error))[0].strip(), _FINAL.search(text) is not None
    word, status = code.groups()
    if status is None:
        return word, _FINAL.search(word) is not None
    unknown = _UNKNOWN.search(text)
    return f"{unknown[1]}: {unknown[2]}" if unknown is not None else f"HTTP status {status}", status in _FINAL_STATUSES


def remote_file(system: Any, root: str, info: Any) -> RemoteFile:
    """An object of the folder `root`, with its ETag. Raises OSError."""
    with system.open_input_file(info.path) as stream:
        return RemoteFile(info.path.removeprefix(root.rstrip("/") + "/"), info.size, _digest(stream.metadata()))


def _digest(metadata: dict[str, bytes] | None) -> str:
    tag = next((value for key, value in (metadata or {}).items() if key.lower() == "etag"), b"")
    text = tag.decode(errors="replace") if isinstance(tag, bytes) else str(tag)
    return f"etag:{text.strip(chr(34))}" if text else ""


def _is_etag(path: Path, size: int, tag: str) -> bool:
    value, _, parts = tag.partition("-")
    if not parts:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest() == value
    return any(_etag_in_parts(path, part) == value for part in _part_sizes(size, int(parts)))


def _part_sizes(size: int, parts: int) -> Iterator[int]:
    """Sizes that make so many parts of it; of one part any does."""
    sizes = PART_BYTES if parts > 1 else (max(size, 1),)
    return (part for part in sizes if max(1, -(-size // part)) == parts)


def _etag_in_parts(path: Path, part_bytes: int) -> str:
    """MD5 over the MD5s of the parts."""
    whole = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        first = True
        while first or file.peek(1):
            part, left, first = hashlib.md5(usedforsecurity=False), part_bytes, False
            while left and (chunk := file.read(min(left, CHUNK_BYTES))):
                part.update(chunk)
                left -= len(chunk)
            whole.update(part.digest())
    return whole.hexdigest()
