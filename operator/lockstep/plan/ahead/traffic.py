"""Bytes that a run leaves on its volumes, and those that an optimizer step sends between nodes (pure): collectives as DeepSpeed 0.19 issues
them, rings as NCCL and gloo run them.

A ring over n ranks that all-gathers or reduce-scatters M bytes carries (n−1)/n × M over every link of it, and twice that for an all-reduce.
Whatever the number of ranks on a node, a ring leaves the node and comes back once; so that is what its network cards send, and receive, for
one node.

- Stage1 and Stage2 reduce gradients of what is trained by all-reduce (`use_multi_rank_bucket_allreduce`, on by default), Stage1 once a
  step, Stage2 after every micro-batch, since it keeps only a rank's part of them; after the update the new weights of what is trained are
  all-gathered once.
- Stage3 reduce-scatters gradients after every micro-batch, and all-gathers every weight, frozen ones too, for the forward pass, for the
  backward pass and, in layers of which something is computed again, for that. A prefetch that keeps a layer between two of them sends less:
  this is the most.
- With a second copy on each node (hpZ) frozen weights are gathered within the node; only what is trained crosses.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep_spec.choices import Method, ZeroStage
from lockstep_spec.memory import STATE_BYTES, Place, base_bytes, trained_elements
from lockstep_spec.settings import Level, Settings
from lockstep_spec.shape import ModelShape


@dataclass(frozen=True)
class Flow:
    """One kind of traffic of an optimizer step."""

    name: str
    node_bytes: int
    """Bytes that each node sends, and receives."""


def step_traffic(shape: ModelShape, settings: Settings, place: Place, accumulation: int) -> list[Flow]:
    """Largest first; [] for a single node. `accumulation`: micro-batches a rank computes for one step."""
    ranks = place.world_size
    if ranks <= place.ranks_per_node:
        return []
    trained = trained_elements(shape, settings) * settings.element_bytes
    flows = _stage3(shape, settings, place, trained, accumulation) if settings.zero_stage is ZeroStage.STAGE3 else None
    if flows is None:
        reduced = trained * (accumulation if settings.zero_stage is ZeroStage.STAGE2 else 1)
        flows = [("gradients, all-reduced", 2 * reduced), ("updated weights, gathered", trained)]
    counted = [Flow(name, size * (ranks - 1) // ranks) for name, size in flows if size]
    return sorted(counted, key=lambda flow: -flow.node_bytes)


def _stage3(shape: ModelShape, settings: Settings, place: Place, trained: int, accumulation: int) -> list[tuple[str, int]]:
    passes = accumulation * (2 + settings.recomputed.share(Level.NORMS, shape.layers))
    frozen = 0 if settings.method is Method.FULL else base_bytes(shape, settings)
    crossing = frozen if place.partition <= 1 else 0
    return [
        ("frozen weights, gathered", round(crossing * passes)),
        ("trained weights, gathered", round(trained * passes)),
        ("gradients, reduce-scattered", trained * accumulation),
    ]


def total_bytes(flows: list[Flow]) -> int:
    return sum(flow.node_bytes for flow in flows)


def gigabits_per_second(node_bytes: float, seconds: float) -> float:
    """Rate that a node's network needs to carry so much in so long, in decimal Gb/s."""
    return node_bytes * 8 / seconds / 1e9


def commit_bytes(shape: ModelShape, settings: Settings, *, full: bool, copies: int = 1) -> int:
    """One commit's shards; `full`: masters and moments, else the trained weights alone."""
    trained = trained_elements(shape, settings)
    return copies * trained * (STATE_BYTES if full else settings.element_bytes)


def saves(steps: int, every: int, keep: int, bytes_each: int, *, evaluates: bool) -> tuple[int, int]:
    """Return how many commits the whole run makes, the last step's included, and the bytes on all volumes together at the worst moment: of
    the commits that are kept, the best one by evaluation, and the one being written.

    Manifests and the shards' headers, some kilobytes each, are not counted.
    """
    count = -(-steps // every)
    return count, bytes_each * min(count, keep + 1 + (1 if evaluates else 0))
