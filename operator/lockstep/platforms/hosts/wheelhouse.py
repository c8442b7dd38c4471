"""A folder of wheels on this machine: those that hosts need. uv finds them there, else in a package index, and they are downloaded by
their SHA-256.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import tomllib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from lockstep.api.errors import Failed
from lockstep.environments import cache_root, installer
from lockstep.plan.hosts.wheels import HostTarget, Offer, Pin, lock_of, offers_of
from lockstep.platforms.hosts.ssh import alone_at
from lockstep.platforms.places.values import Say
from lockstep.programs import WORDS_MAX

if TYPE_CHECKING:
    from aiohttp import ClientSession

INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
"""Variables that name the index of this machine, as uv and pip read them."""
AT_ONCE = 6
TRIES = 4
RETRY_SECONDS = 2.0
READ_SECONDS = 60.0
PIECE_BYTES = 1 << 20
R = TypeVar("R")


@dataclass(frozen=True)
class WheelFile:
    """A file of a package, on this machine."""

    path: Path
    sha256: str

    @property
    def size(self) -> int:
        return self.path.stat().st_size


def cache_folder() -> Path:
    """Folder for what is downloaded, where no wheelhouse is named."""
    return cache_root() / "wheels"


def index_here(stated: str | None) -> str | None:
    """Return the package index that this machine asks: that of the cluster file, or of a variable; None: uv's own choice."""
    return stated or next((value for name in INDEX_VARIABLES if (value := os.environ.get(name))), None)


async def gather(
    pins: Sequence[Pin], targets: Iterable[HostTarget], folder: Path, index: str | None, say: Say
) -> dict[HostTarget, list[WheelFile]]:
    """Return, for each Python, a file of every package of a lock that is for it, downloading into the folder those that aren't there.

    Raises Failed for a file that is not the lock's, for packages that no file of the index fits, and for downloads that fail.
    """
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    uv = await asyncio.to_thread(installer, cache_root())
    files = {}
    async with alone_at(cache_root() / "wheels.lock"):
        for target in dict.fromkeys(targets):
            offers = offers_of(await asyncio.to_thread(_listing, uv, lock_of(pins), target, folder, index), pins, target)
            lacking = [offer for offer in offers if not offer.is_here]
            if lacking:
                say(f"downloading {len(lacking)} files into {folder}")
                await _download(lacking, folder)
            files[target] = [WheelFile(folder / offer.name, offer.sha256) for offer in offers]
    return files


def _listing(uv: str, lock: str, target: HostTarget, folder: Path, index: str | None) -> dict[str, object]:
    """Return uv's pylock.toml of the packages that a Python needs: without a network if the folder has them all. Raises Failed."""
    command = [uv, "pip", "compile", "--quiet", "--no-deps", "--format", "pylock.toml", *target.options, "--find-links", str(folder), "-"]
    problems = []
    for more in (["--no-index"], ["--default-index", index] if index else []):
        done = subprocess.run(
            [*command, *more], input=lock, capture_output=True, text=True, env={"UV_SYSTEM_CERTS": "1", **os.environ}, check=False
        )
        if done.returncode == 0:
            return tomllib.loads(done.stdout)
        problems.append(" ".join(done.stderr.split())[: WORDS_MAX // 2])
    raise Failed(
        f"no files for {target}: {folder} alone: {problems[0]}; with the index: {problems[1]}; make the lock for that Python, or name"
        " another by environment.python in the cluster file"
    )


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def _download(offers: Sequence[Offer], folder: Path) -> None:
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(offer: Offer) -> None:
        async with limit:
            await download(session, offer.url, folder / offer.name, offer.sha256)

    async with _session() as session:
        try:
            async with asyncio.TaskGroup() as group:
                for offer in offers:
                    group.create_task(one(offer))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None


async def download(session: ClientSession, url: str, path: Path, sha256: str | None) -> None:
    """Download a file, or the rest of it. It has its name when all of it is here. `sha256`: None where its user knows it."""
    part = path.with_name(f".{path.name}.part")

    async def read() -> None:
        size = part.stat().st_size if part.exists() else 0
        async with session.get(url, headers={"Range": f"bytes={size}-"} if size else {}) as response:
            if response.status != 416:  # (all of it is here)
                response.raise_for_status()
                with part.open("ab" if response.status == 206 else "wb") as file:
                    async for data in response.content.iter_chunked(PIECE_BYTES):
                        file.write(data)
        digest = await asyncio.to_thread(digest_of, part)
        if sha256 is not None and digest != sha256:
            part.unlink()
            raise Failed(f"{_shown(url)} has the SHA-256 {digest}, and {sha256} is expected: it was removed")
        part.replace(path)

    await _again(read, _shown(url))


async def fetch(url: str, path: Path) -> None:
    """Download a file whose digest its user knows, if it isn't there. Raises Failed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    async with alone_at(cache_root() / "wheels.lock"), _session() as session:  # (several hosts may wait for one file)
        if not await asyncio.to_thread(path.exists):
            await download(session, url, path, None)


def _session() -> ClientSession:
    from aiohttp import ClientSession, ClientTimeout

    return ClientSession(trust_env=True, timeout=ClientTimeout(total=None, sock_connect=READ_SECONDS, sock_read=READ_SECONDS))


async def _again(work: Callable[[], Awaitable[R]], what: str) -> R:
    """Do it, and again where the network failed. Raises Failed with what it said last."""
    from aiohttp import ClientError, ClientResponseError

    for number in range(1, TRIES + 1):
        try:
            return await work()
        except (ClientError, TimeoutError, OSError, ValueError, KeyError) as error:
            final = isinstance(error, ValueError | KeyError) or (isinstance(error, ClientResponseError) and 400 <= error.status < 500)
            if final or number == TRIES:
                words = f"it answers {error.status}" if isinstance(error, ClientResponseError) else str(error) or type(error).__name__
                raise Failed(f"{what} can't be downloaded: {words}") from None
            await asyncio.sleep(RETRY_SECONDS * number)
    raise AssertionError


def _shown(url: str) -> str:
    """Return an address without the login that it may have."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
