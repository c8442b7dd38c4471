"""Reason why a build tool failed, from the end of its output, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from lockstep.plan.ship.imagebuild import Tool

PRUNE = {Tool.PODMAN: "podman system prune", Tool.BUILDAH: "buildah rmi --prune", Tool.DOCKER: "docker system prune"}
"""Commands that free the layers that no image uses."""
Advice = Callable[[Tool], str]
CAUSES: Sequence[tuple[str, Advice]] = (
    (
        r"no space left on device|disk quota exceeded",
        lambda tool: (
            f"the disk that holds {tool}'s images (or TMPDIR) is full: {PRUNE[tool]} frees what no image uses; docs/how-to/images.md says what a build takes"
        ),
    ),
    (
        r"cannot connect to the docker daemon|docker daemon is not running|docker\.sock",
        lambda tool: "docker's engine doesn't answer: start it (systemctl start docker), or use --tool podman or --tool buildah",
    ),
    (
        r"unknown flag: --secret|buildx component",
        lambda tool: (
            "this docker has no BuildKit: install its buildx component (apt-get install docker-buildx), or use --tool podman or --tool buildah"
        ),
    ),
    (
        r"do not match the hashes",
        lambda tool: (
            "the package index gave another file than requirements/*.lock names, so nothing was installed: use another index, or run make lock"
        ),
    ),
    (
        r"no matching distribution|failed to establish a new connection|max retries exceeded|read timed out|newconnectionerror",
        lambda tool: (
            "pip inside the build can't get a package: it uses this machine's pip.conf, PIP_INDEX_URL, certificates and proxies (docs/how-to/images.md)"
        ),
    ),
    (
        r"unable to fetch some archives|unable to locate package|failed to fetch|no package .* available|cannot download repomd",
        lambda tool: (
            "the base's own packages can't be fetched: is its repository reachable from here, and does it have them? (--arg APT_TOOLS=…, DNF_TOOLS=…)"
        ),
    ),
    (
        r"newuidmap|cannot clone|user namespace|unshare\(|operation not permitted",
        lambda tool: (
            "this user may not create containers on this machine: see docs/how-to/images.md, Without the rights that builders want"
        ),
    ),
    (
        r"unauthorized|authentication required|access denied|access to the resource is denied|denied: |no basic auth",
        lambda tool: f"the registry requires a login: {tool} login REGISTRY",
    ),
    (
        r"initializing source|pinging container registry|failed to resolve source metadata|manifest unknown|short-name|pull access|no such image|error creating build container",
        lambda tool: "the base image can't be pulled: name one that this machine has or can reach with --base IMAGE",
    ),
)
"""The first that is found in the tool's last lines counts. Matched without regard to case."""


def tool_failure(command: Sequence[str], code: int, lines: Sequence[str]) -> str:
    """One sentence: the command, what its error output ended with, and what to do. `lines` have been on the screen already."""
    tool, verb = Tool(command[0]), command[1]
    head = f"{tool} {verb} failed with exit code {code}"
    for pattern, advice in CAUSES:
        matches = [line.strip() for line in lines if re.search(pattern, line, re.IGNORECASE)]
        if matches:
            return f"{head}: {_short(matches[-1])}: {advice(tool)}"
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{head}: {_short(last)}; more is above" if last else f"{head}; its output is above"


def _short(line: str, limit: int = 300) -> str:
    return line if len(line) <= limit else f"{line[:limit]} …"
