"""Pretended resources of nodes, as they are written on the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lockstep.api.errors import ConfigError

FORM = re.compile(r"^(?:(\d+):)?([a-z0-9][-a-z0-9.]*/[A-Za-z0-9][-A-Za-z0-9_.]*)=(\d+)$")


def parse(texts: Sequence[str], nodes: int) -> Mapping[int | None, Mapping[str, int]]:
    """`nvidia.com/gpu=4` is for every node (key None), `1:nvidia.com/gpu=4` for node 1.

    Raises:
        ConfigError: not of that form, or a node that there isn't.
    """
    found: dict[int | None, dict[str, int]] = {}
    for text in texts:
        match = FORM.match(text)
        if match is None:
            raise ConfigError(f"--resource {text}: must be domain/name=count, or node:domain/name=count, for example nvidia.com/gpu=4")
        number, name, count = match.groups()
        if number is not None and int(number) >= nodes:
            raise ConfigError(f"--resource {text}: there is no node {number}; nodes are 0 to {nodes - 1}")
        found.setdefault(None if number is None else int(number), {})[name] = int(count)
    return found
