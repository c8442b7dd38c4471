"""Where what is derived from the data is kept, and what is known of the files it was derived from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from lockstep_train.checkpoint.durable import make_directory, write_durably
from lockstep_train.data.arrays import file_digest
from lockstep_train.errors import ConfigError

SAMPLED_BYTES = 1 << 16
SAMPLES = 16


def cache_folder(run_dir: Path) -> Path:
    """The workspace's cache, shared by all runs beside each other in `runs`; else one in the run's own folder. The data's own
    folder may be read-only."""
    return run_dir.parent.parent / "cache" if run_dir.parent.name == "runs" else run_dir / "cache"


def content_digest(path: Path, cache: Path) -> str:
    """SHA-256 of a file. Raises ConfigError when it can't be read.

    A file that has been hashed before isn't read again while its size, its time of change and 16 samples of it are the same. The
    identity of a run's data comes from the tokens themselves, so a change that hides from all three (same length, time put back,
    between the samples) would only mean that the tokens from before it are used.
    """
    try:
        seen = {"size": path.stat().st_size, "changed": path.stat().st_mtime_ns, "samples": sampled_digest(path)}
        note = cache / "files" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
        known = read_note(note)
        if known is not None and known.get("seen") == seen:
            return str(known["sha256"])
        digest = file_digest(path)
    except OSError as error:
        raise ConfigError(f"the data {path} can't be read: {error.strerror}") from error
    make_directory(note.parent)
    write_durably(note, json.dumps({"path": str(path), "seen": seen, "sha256": digest}).encode())
    return digest


def read_note(path: Path) -> dict[str, object] | None:
    """None when it isn't there or is damaged: then the file is hashed anew."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and "sha256" in value else None


def sampled_digest(path: Path) -> str:
    """Over evenly spaced samples, the first and the last bytes among them."""
    digest = hashlib.sha256()
    size = path.stat().st_size
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(max(0, size - SAMPLED_BYTES) * number // (SAMPLES - 1))
            digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()
