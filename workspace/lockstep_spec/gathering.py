"""Elements of the weights that Stage3 may have gathered at once, and that it fetches ahead (pure): from the model's largest layer.

DeepSpeed fetches ahead only as long as fewer elements than its limit are gathered. By default that is 10⁹, which the experts of one layer of a large mixture of experts
exceed alone, so that nothing would be fetched while they compute; and it fetches 5·10⁷ elements ahead, a quarter of a layer of an 8B model.
"""

from __future__ import annotations

from lockstep_spec.shape import ModelShape, layer_of

LIVE_ELEMENTS = 1_000_000_000
AHEAD_ELEMENTS = 50_000_000
"""DeepSpeed's defaults, below which nothing is gained: smaller models stay gathered for longer, and are gathered less often."""


def layer_elements(shape: ModelShape) -> int:
    """Elements of the layer with the most weights: of all modules below the same number, such as model.layers.3."""
    layers: dict[str, int] = {}
    for weight in shape.weights:
        if layer := layer_of(weight.name):
            layers[layer] = layers.get(layer, 0) + weight.numel
    return max(layers.values(), default=0)


def ahead_elements(shape: ModelShape) -> int:
    """Fetched ahead: the next layer, while one computes."""
    return max(AHEAD_ELEMENTS, layer_elements(shape))


def most_gathered(shape: ModelShape, stated: int | None) -> int:
    """Elements that are gathered at the same time where a module is not larger. `stated`: the limit of the raw settings, where they have one."""
    if stated is not None:
        return stated
    live = live_elements(shape)
    return live if live == LIVE_ELEMENTS else live + _largest(shape)


def live_elements(shape: ModelShape) -> int:
    """Gathered before DeepSpeed fetches no more ahead: two layers with that weight by which it may exceed its limit."""
    return max(LIVE_ELEMENTS, 2 * max(layer_elements(shape), shape.largest_module) - _largest(shape))


def _largest(shape: ModelShape) -> int:
    return max((weight.numel for weight in shape.weights), default=0)
