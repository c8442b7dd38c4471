"""Code in a build of torch, and the GPUs that it runs on."""

from __future__ import annotations

import re
from collections.abc import Sequence

_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


def has_kernels(capability: tuple[int, int], built: Sequence[str]) -> bool:
    """Return True if a build of torch for these architectures (`torch.cuda.get_arch_list()`) runs on the device; True, too, where the list
    has none of CUDA's names.

    Code of sm_86 runs on every 8.x from 8.6 on; sm_90a on that one alone; compute_90 is compiled at the start for all from 9.0 on.
    """
    matches = [match for name in built if (match := _ARCHITECTURE.fullmatch(name))]
    return not matches or any(_runs(match, capability) for match in matches)


def _runs(match: re.Match[str], capability: tuple[int, int]) -> bool:
    architecture = int(match[2]), int(match[3])
    if match[4] == "a":
        return architecture == capability
    if match[1] == "compute" and not match[4]:
        return architecture <= capability
    return architecture[0] == capability[0] and architecture[1] <= capability[1]
