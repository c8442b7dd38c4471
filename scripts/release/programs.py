"""Programs that make and try a release, built from Go modules once: `programs/NAME/go.mod` has the version, go.sum the hashes."""

from __future__ import annotations

from pathlib import Path

from lockstep.devcluster.binary import go_build, source_key
from lockstep.devcluster.host.processes import locked
from lockstep.environments import cache_root
from setup import say

SOURCES = Path(__file__).parent / "programs"
OPTIONS = ["-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags", "-s -w"]


def program(name: str) -> Path:
    """Return the program's path; it takes minutes to build, nothing when it is in the cache.

    A folder with a main.go is built itself, any other for the `tool` that its go.mod names.

    Raises:
        BuildError: the Go command failed; the message has its last words and names its log.
    """
    source = SOURCES / name
    target = cache_root() / "release" / source_key(source, OPTIONS) / name
    with locked(target.with_suffix(".lock")):
        if not target.exists():
            say(f"building {name} from its Go module (minutes the first time, cached afterwards)")
            go_build(target, "." if (source / "main.go").exists() else "tool", OPTIONS, source, {"CGO_ENABLED": "0"})
    return target
