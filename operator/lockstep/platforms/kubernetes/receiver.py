"""The pod's end of `lockstep sync`: run there by its own Python (3.10 or newer), as text; so nothing is imported but the standard library.

One line of JSON in says what the sender has, one line out what is wanted; then the size of a tar and the tar come in, and one line goes out.
What an earlier sync put here is remembered, so that only that is ever deleted, and what was changed here meanwhile is never written over unasked.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
from pathlib import Path
from typing import Any, BinaryIO

RECORD = ".lockstep/sync.json"
Files = dict[str, dict[str, Any]]


def digest(path: Path) -> str | None:
    """SHA-256 of a file's bytes, or of a link's target; None: it isn't there."""
    try:
        if path.is_symlink():
            return hashlib.sha256(os.readlink(path).encode()).hexdigest()  # noqa: PTH115 (what is written in it, not a Path)
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def compare(target: Path, files: Files, record: dict[str, str], force: bool) -> dict[str, list[str]]:
    """What to send, what to remove, and what was changed here since the last sync and so stays unless forced."""
    wanted: list[str] = []
    removed: list[str] = []
    changed: list[str] = []
    for name, file in files.items():
        here = digest(target / name)
        if here == file["sha256"] and (file["link"] or os.access(target / name, os.X_OK) == file["executable"]):
            continue
        touched = here is not None and here not in (record.get(name), file["sha256"])
        (changed if touched and not force else wanted).append(name)
    for name, before in record.items():
        if name not in files and (here := digest(target / name)) is not None:
            (removed if force or here == before else changed).append(name)
    return {"wanted": wanted, "removed": removed, "changed": changed}


def unpack(target: Path, archive: bytes) -> None:
    """Each file under another name first: who reads it meanwhile sees the old or the new one, never half."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            place = inside(target, member.name)
            place.parent.mkdir(parents=True, exist_ok=True)
            draft = place.with_name(f".{place.name}.sync-{os.getpid()}")
            if member.issym():
                inside(target, os.path.normpath(str(Path(member.name).parent / member.linkname)))
                draft.symlink_to(member.linkname)
            else:
                content = tar.extractfile(member)
                draft.write_bytes(content.read() if content is not None else b"")
                draft.chmod(0o775 if member.mode & 0o100 else 0o664)
            draft.replace(place)


def inside(target: Path, name: str) -> Path:
    """`name` below `target`. Raises ValueError when it would lead outside, by .. or by a link on the way."""
    place = target / name
    root = target.resolve()
    if Path(name).is_absolute() or ".." in Path(name).parts or root not in (*place.parent.resolve().parents, place.parent.resolve()):
        raise ValueError(f"{name} would be outside of {target}")
    return place


def remove(target: Path, names: list[str]) -> None:
    """Files, and folders that are empty then."""
    for name in names:
        place = inside(target, name)
        place.unlink(missing_ok=True)
        for folder in place.parents:
            if folder == target or any(folder.iterdir()):
                break
            folder.rmdir()


def read_record(target: Path) -> dict[str, str]:
    try:
        found = json.loads((target / RECORD).read_text())
        return {str(name): str(value) for name, value in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def write_record(target: Path, record: dict[str, str]) -> None:
    path = target / RECORD
    path.parent.mkdir(exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(record, indent=0))
    draft.replace(path)


def serve(source: BinaryIO, say: BinaryIO) -> None:
    request = json.loads(source.readline())
    target, files = Path(request["target"]), request["files"]
    target.mkdir(parents=True, exist_ok=True)
    record = read_record(target)
    found = compare(target, files, record, request["force"])
    tell(say, found)
    size = int(source.readline())
    archive = source.read(size)
    if len(archive) != size:
        raise EOFError(f"received {len(archive)} of {size} bytes")
    unpack(target, archive)
    remove(target, found["removed"])
    kept = {name: record[name] for name in found["changed"] if name in record}
    write_record(target, {**{name: file["sha256"] for name, file in files.items() if name not in found["changed"]}, **kept})
    tell(say, {"done": True})


def tell(say: BinaryIO, value: object) -> None:
    say.write(json.dumps(value).encode() + b"\n")
    say.flush()


if __name__ == "__main__":
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except (OSError, ValueError, EOFError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
