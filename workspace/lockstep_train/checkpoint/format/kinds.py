"""Names of the tensors in a shard. Each is one flat tensor: the fragments' elements in the order of the manifest's records."""

from __future__ import annotations

MASTER = "fp32"
"""FP32 masters."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's, in FP32."""
WEIGHTS = "weights"
"""The trained weights as the model computes with them: in the run's precision."""

FULL = (MASTER, *MOMENTS)
LITE = (WEIGHTS,)


def kinds_of(content: str) -> tuple[str, ...]:
    """The tensors of a commit whose manifest says `content`."""
    return {"Full": FULL, "Lite": LITE}[content]
