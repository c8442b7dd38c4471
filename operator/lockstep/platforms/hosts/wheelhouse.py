"""A folder of wheels on this machine: those that hosts need, looked for there first, then downloaded from a package index by their
SHA-256.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from lockstep.api.errors import Failed
from lockstep.environments import cache_root
from lockstep.plan.hosts.wheels import FILE_NAME, HostTarget, Pin, best, is_of
from lockstep_spec.words import decimal_size, listed

if TYPE_CHECKING:
    from aiohttp import ClientSession

PYPI = "https://pypi.org/simple"
INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
"""Variables that name the index of this machine, as uv and pip read them."""
ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
AT_ONCE = 6
TRIES = 4
RETRY_SECONDS = 2.0
READ_SECONDS = 60.0
PAGE_BYTES_MAX = 32 << 20
PIECE_BYTES = 1 << 20
Say = Callable[[str], None]
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class WheelFile:
    """A file of a package, on this machine."""

    path: Path
    sha256: str

    @property
    def size(self) -> int:
        return self.path.stat().st_size


@dataclass(frozen=True)
class Offer:
    """A file as an index lists it."""

    name: str
    url: str
    sha256: str


def cache_folder() -> Path:
    """Folder for what is downloaded, where no wheelhouse is named."""
    return cache_root() / "wheels"


def index_here(stated: str | None) -> str:
    """Return the package index that this machine asks: that of the cluster file, of uv's and pip's variables, or PyPI."""
    return stated or next((value for name in INDEX_VARIABLES if (value := os.environ.get(name))), PYPI)


async def gather(
    pins: Sequence[Pin], targets: Iterable[HostTarget], folder: Path, index: str, say: Say
) -> dict[HostTarget, list[WheelFile]]:
    """Return, for each Python, a file of every package, downloading into the folder those that aren't there.

    Raises Failed for a file that is not the lock's, for packages that no file of the index fits, and for downloads that fail.
    """
    targets = list(dict.fromkeys(targets))
    here = {pin: _present(pin, folder) for pin in pins}
    lacking = [pin for pin in pins if any(best(here[pin], pin, target) is None for target in targets)]
    offers = await _offers(lacking, targets, here, index) if lacking else {}
    if offers:
        say(f"downloading {len(offers)} files into {folder}")
        await _download(offers, folder)
    chosen: dict[HostTarget, list[WheelFile]] = {target: [] for target in targets}
    digests: dict[str, str] = {offer.name: offer.sha256 for offer in offers.values()}
    for pin in pins:
        names = [*here[pin], *(offer.name for offer in offers.values() if is_of(offer.name, pin))]
        for target in targets:
            name = best(names, pin, target)
            if name is None:
                continue  # (conditional: not for that Python)
            if name not in digests:
                digests[name] = await asyncio.to_thread(_checked, folder / name, pin)
            chosen[target].append(WheelFile(folder / name, digests[name]))
    return chosen


def _present(pin: Pin, folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    return sorted(path.name for path in folder.iterdir() if is_of(path.name, pin))


def _checked(path: Path, pin: Pin) -> str:
    digest = digest_of(path)
    if digest not in pin.hashes:
        raise Failed(
            f"{path} has the SHA-256 {digest}, but the lock has {pin.expects()} for {pin.name} {pin.version}: nothing of it was sent;"
            " remove the file"
        )
    return digest


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def _offers(pins: Sequence[Pin], targets: Sequence[HostTarget], here: Mapping[Pin, Sequence[str]], index: str) -> dict[str, Offer]:
    """Return files of the index, by name, for packages that the folder has not for every Python."""
    async with _session() as session:
        pages = await _all(pins, lambda pin: _page(session, index, pin))
    offers: dict[str, Offer] = {}
    problems = []
    for pin, page in zip(pins, pages, strict=True):
        fitting = {offer.name: offer for offer in page if offer.sha256 in pin.hashes}
        for target in targets:
            if best(here[pin], pin, target) is not None:
                continue
            name = best(fitting, pin, target)
            if name is not None:
                offers[name] = fitting[name]
            elif not pin.conditional:
                problems.append(f"{pin.name} {pin.version} for {target}")
    if problems:
        raise Failed(
            f"{_shown(index)} has no file with a digest of the lock for {listed(problems)}: make the lock for that Python, or name another"
            " by environment.python in the cluster file"
        )
    return offers


async def _page(session: ClientSession, index: str, pin: Pin) -> list[Offer]:
    url = f"{index.rstrip('/')}/{pin.name}/"

    async def read() -> list[Offer]:
        async with session.get(url, headers={"Accept": ACCEPT}) as response:
            if response.status == 404:
                return []
            response.raise_for_status()
            body = await response.content.read(PAGE_BYTES_MAX)
            while piece := await response.content.read(PAGE_BYTES_MAX):
                body += piece
                if len(body) > PAGE_BYTES_MAX:
                    raise Failed(f"{_shown(url)} is larger than {decimal_size(PAGE_BYTES_MAX)}, which no page of an index is")
            text = body.decode(errors="replace")
            base = str(response.url)
        return from_json(text, base) if "json" in response.content_type else from_html(text, base)

    return await _again(read, _shown(url))


def from_json(text: str, base: str) -> list[Offer]:
    """Files on a page of an index, as its JSON lists them."""
    import json

    page: Any = json.loads(text)
    return [
        Offer(str(entry["filename"]), urljoin(base, str(entry["url"])), str(entry["hashes"]["sha256"]))
        for entry in page["files"]
        if "sha256" in entry.get("hashes", {}) and FILE_NAME.fullmatch(str(entry["filename"]))
    ]


def from_html(text: str, base: str) -> list[Offer]:
    """Files on a page of an index that has no JSON: links with a digest."""
    offers: list[Offer] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            url, fragment = urldefrag(urljoin(base, dict(attrs).get("href") or ""))
            match = re.fullmatch(r"sha256=([0-9a-f]{64})", fragment)
            name = unquote(urlsplit(url).path.rpartition("/")[2])
            if tag == "a" and match and FILE_NAME.fullmatch(name):
                offers.append(Offer(name, url, match[1]))

    Links().feed(text)
    return offers


async def _download(offers: Mapping[str, Offer], folder: Path) -> None:
    async with _session() as session:
        await _all(list(offers.values()), lambda offer: download(session, offer.url, folder / offer.name, offer.sha256))


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
    if await asyncio.to_thread(path.exists):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    async with _session() as session:
        await download(session, url, path, None)


def _session() -> ClientSession:
    from aiohttp import ClientSession, ClientTimeout

    return ClientSession(trust_env=True, timeout=ClientTimeout(total=None, sock_connect=READ_SECONDS, sock_read=READ_SECONDS))


async def _all(items: Sequence[T], work: Callable[[T], Awaitable[R]]) -> list[R]:
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(item: T) -> R:
        async with limit:
            return await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in items]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


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
