"""Bytes that a forward and a backward pass hold beside weights and optimizer state (pure): counted operation by operation in transformers'
decoders.

tests/train/engine/test_memory_plan.py holds these counts against what ranks really held. docs/how-to/memory.md explains them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lockstep_spec.choices import Method, ZeroStage
from lockstep_spec.settings import Level, Settings
from lockstep_spec.shape import ModelShape, layer_of

FP32_BYTES = 4
INTO_ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "q_a_proj", "kv_a_proj_with_mqa")
FROM_LATENT = ("q_b_proj", "kv_b_proj")
OUT_OF_ATTENTION = ("o_proj", "out_proj", "dense")
INTO_FEED_FORWARD = ("gate_proj", "up_proj", "gate_up_proj", "fc1", "c_fc", "dense_h_to_4h")
OUT_OF_FEED_FORWARD = ("down_proj", "fc2", "c_proj", "dense_4h_to_h")
"""Linear layers by transformers' names for them."""
TILE_ELEMENTS = 1 << 26
"""Logits of a tile (engine/loss.py), of which no others exist: 256 MB in FP32, still hundreds of tokens for the largest vocabularies."""


def tokens_of(settings: Settings) -> int:
    """Tokens of a micro-batch at its longest."""
    return settings.max_length * settings.micro_batch_size


def layer_bytes(shape: ModelShape, settings: Settings) -> int:
    """Tensors that autograd keeps of one decoder layer until its backward pass."""
    return attention_bytes(shape, settings) + tokens_of(settings) * (_feed_forward(shape, settings) + _dropped(shape, settings))


def attention_bytes(shape: ModelShape, settings: Settings) -> int:
    """Bytes of `layer_bytes` that are there before the feed-forward part computes, and when its backward pass is done: attention's, and the
    norms'.
    """
    mask = settings.element_bytes * settings.micro_batch_size * settings.max_length**2 if shape.masked else 0
    return tokens_of(settings) * (_attention(shape, settings) + _norms(shape, settings)) + _scores(shape, settings) + mask


def kept_bytes(shape: ModelShape, settings: Settings) -> int:
    """Bytes that all layers keep from the forward to the backward pass."""
    levels = [settings.recomputed.of(layer) for layer in range(shape.layers)]
    return sum(levels.count(level) * level_bytes(shape, settings, level) for level in Level)


def level_bytes(shape: ModelShape, settings: Settings, level: Level) -> int:
    """Bytes of `layer_bytes` that a layer keeps of which the backward pass computes as much again as `level` says (engine/recompute.py):
    its input, attention's output where a kernel computes it, with the logarithm of each head's sum of scores, and what wide matrices gave.
    """
    if level is Level.NONE:
        return layer_bytes(shape, settings)
    per_token = shape.hidden * settings.element_bytes
    if level <= Level.ATTENTION and not shape.score_heads:
        per_token += shape.attended * settings.element_bytes + shape.heads * FP32_BYTES
    if level <= Level.NORMS:
        per_token += settings.element_bytes * (_products(shape) + _low_rank(settings))
    return tokens_of(settings) * per_token


def again_bytes(shape: ModelShape, settings: Settings, needed: int) -> int:
    """Bytes of the last layer that its backward pass computes again of the `needed` ones."""
    last = settings.recomputed.of(shape.layers - 1)
    if last is Level.NONE:
        return 0
    return max(0, needed - level_bytes(shape, settings, last) + level_bytes(shape, settings, Level.ALL))


def _products(shape: ModelShape) -> int:
    """Elements of a token that matrices give in a layer whose inputs are at least as wide as the hidden size, on average. Of stacks a token
    passes its experts' alone. GPT-2 has its matrices the other way round, which their biases tell.
    """
    biases = {weight.module: weight.numel for weight in shape.weights if weight.name.endswith(".bias")}
    elements = 0
    for weight in shape.weights:
        if weight.tower or not layer_of(weight.name) or len(weight.shape) < 2:
            continue
        outputs = biases.get(weight.module, weight.shape[-2])
        if math.prod(weight.shape[-2:]) >= outputs * shape.hidden:
            elements += outputs * (shape.experts_per_token if len(weight.shape) == 3 else 1)
    return elements // shape.layers


def gradient_bytes(shape: ModelShape, settings: Settings) -> int:
    """Gradients of the widest tensors of one layer, those of its feed-forward part, at the same time."""
    weighed = FP32_BYTES if shape.weighs_in_fp32 else settings.element_bytes
    routed = 3 * weighed * shape.experts_per_token * shape.hidden
    per_token = settings.element_bytes * 3 * shape.intermediate + routed + 2 * FP32_BYTES * shape.hidden
    return tokens_of(settings) * per_token


def score_gradient_bytes(shape: ModelShape, settings: Settings) -> int:
    """Bytes of gradients of scores that are held whole: before and after the softmax in FP32, when what came after it is gone."""
    gone = 0 if shape.by_steps else settings.element_bytes
    return _pairs(shape, settings) * (2 * FP32_BYTES - gone)


def last_rows_bytes(shape: ModelShape, settings: Settings) -> int:
    """The last norm's input in FP32, and of a tiled loss the rows that are learned and their gradient."""
    rows = 0 if whole_logits(shape, settings) else 2 * settings.element_bytes
    return tokens_of(settings) * shape.hidden * (FP32_BYTES + rows)


def tile_bytes(shape: ModelShape, settings: Settings) -> int:
    """Logits of a tile, in BF16 and FP16 once more in FP32, and their logarithms; of a head that is trained, its gradient in FP32 as
    well.
    """
    element = settings.element_bytes
    each = 2 * FP32_BYTES + (element if element < FP32_BYTES else 0)
    is_trained = settings.method is Method.FULL or "lm_head" in settings.adapter.modules_to_save
    head = (FP32_BYTES + element) * shape.vocabulary * shape.hidden if is_trained else 0
    return each * min(tokens_of(settings) * shape.vocabulary, TILE_ELEMENTS) + head


def logits_bytes(shape: ModelShape, settings: Settings) -> int:
    """Whole logits (engine/loss.py, whole_loss) in the backward pass: their logarithms, the loss's gradient and the logits' own in FP32;
    where the model caps or scales its logits, what that keeps of them.
    """
    capped = settings.element_bytes if shape.caps_logits else 0
    return (3 * FP32_BYTES + capped) * tokens_of(settings) * shape.vocabulary


def whole_logits(shape: ModelShape, settings: Settings) -> bool:
    """True if the loss needs whole logits: the model does more after its last layer, or that layer has an adapter (engine/loss.py,
    tile_head).
    """
    return shape.caps_logits or (settings.method is Method.LORA and "lm_head" in _targets(settings))


def folded_bytes(shape: ModelShape, settings: Settings) -> int:
    """Bytes of folded stacks of experts with adapters: peft adds each to a copy, which autograd keeps, and whose gradient is as large."""
    if settings.method is Method.FULL:
        return 0
    stacks = [weight for weight in shape.adapted(settings.adapter.target_parameters) if len(weight.shape) == 3]
    layers: dict[str, int] = {}
    for weight in stacks:
        layers[weight.module] = layers.get(weight.module, 0) + weight.numel
    held = sum(size for number, size in enumerate(layers.values()) if settings.recomputed.of(number) is Level.NONE)
    held = max(held, *layers.values(), 0)
    return settings.element_bytes * (held + max((weight.numel for weight in stacks), default=0))


def _targets(settings: Settings) -> Sequence[str]:
    return [target.rpartition(".")[2] for target in settings.adapter.target_modules]


def _inputs_kept(settings: Settings, *linear: str) -> bool:
    """True if autograd keeps the input of one of these linear layers. It needs none of a frozen one, but DeepSpeed's own linear layer,
    which takes the place of torch's under Stage3, keeps each.
    """
    if settings.method is Method.FULL or settings.zero_stage is ZeroStage.STAGE3:
        return True
    return any(name in _targets(settings) for name in linear)


def _attention(shape: ModelShape, settings: Settings) -> int:
    """Queries and attention's output, keys and values. Outputs of single documents are put together, which is a copy that the next layer
    may keep.
    """
    computed = shape.query + shape.attended + shape.key + shape.value
    if shape.by_steps:
        computed = 2 * (shape.query + shape.attended) * FP32_BYTES // settings.element_bytes
    elements = computed
    if _inputs_kept(settings, *INTO_ATTENTION):
        elements += shape.hidden
    if _inputs_kept(settings, *FROM_LATENT):
        elements += shape.latent
    if (shape.joined or settings.joins) and _inputs_kept(settings, *OUT_OF_ATTENTION):
        elements += shape.attended
    return settings.element_bytes * (elements + _low_rank(settings))


def _low_rank(settings: Settings) -> int:
    """Elements of a token between both matrices of the adapters of a layer."""
    return settings.adapter.rank * len(settings.adapter.target_modules) if settings.method is Method.LORA else 0


def _dropped(shape: ModelShape, settings: Settings) -> int:
    """Bytes kept for each token by the dropout of adapters, on average over the layers: each adapter's own dropped input, and a mask of a
    byte an element, as GPUs have it.
    """
    if settings.method is Method.FULL or not settings.adapter.dropout:
        return 0
    adapted = shape.adapted(settings.adapter.target_modules)
    inputs = sum(weight.shape[-1] for weight in adapted if layer_of(weight.name) and len(weight.shape) == 2)
    return inputs * (settings.element_bytes + 1) // shape.layers


def _feed_forward(shape: ModelShape, settings: Settings) -> int:
    """Bytes kept for each token between its first and its last layer; of routed experts also the output for each of a token's experts."""
    through_linear = shape.intermediate - shape.routed
    elements = shape.factors * shape.intermediate + shape.experts_per_token * shape.hidden
    attentions = shape.layer_norms == 1 and _inputs_kept(settings, *INTO_ATTENTION)
    if _inputs_kept(settings, *INTO_FEED_FORWARD) and not attentions:
        elements += shape.hidden
    if shape.product and _inputs_kept(settings, *OUT_OF_FEED_FORWARD):
        elements += through_linear
    if settings.method is Method.FULL:
        elements += shape.experts_per_token * shape.hidden + shape.routed
    return settings.element_bytes * elements


def _norms(shape: ModelShape, settings: Settings) -> int:
    """Most compute in FP32 and keep their input so; where their weights are trained, also what these are multiplied with."""
    heads = shape.latent + (shape.query + shape.key if shape.head_norms else 0)
    each = FP32_BYTES + (settings.element_bytes if settings.method is Method.FULL else 0)
    if shape.casts_norms:
        return (shape.layer_norms * shape.hidden + heads) * each
    inputs = 1 if shape.parallel else shape.layer_norms
    return inputs * shape.hidden * settings.element_bytes + heads * each


def _scores(shape: ModelShape, settings: Settings) -> int:
    """Bytes of scores in attention that holds them whole, as where they are capped: before and after the softmax, and that in FP32; step by
    step after it alone.
    """
    return _pairs(shape, settings) * (FP32_BYTES + (0 if shape.by_steps else 2 * settings.element_bytes))


def _pairs(shape: ModelShape, settings: Settings) -> int:
    """Pairs of a query and a key, over all heads that hold the score of each."""
    return shape.score_heads * settings.micro_batch_size * settings.max_length**2
