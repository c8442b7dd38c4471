"""How many bytes a rank needs on its device, item by item (pure). docs/how-to/memory.md states the formulas and their sources."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep_sizes.choices import Content, Method, Offload, Quantization, ZeroStage
from lockstep_sizes.settings import Settings
from lockstep_sizes.shape import ModelShape

GIB = 1 << 30
QUANTISED_BYTES = {Quantization.NF4: 0.516, Quantization.INT8: 1.0}
"""Bytes an element of a quantised weight: 4 bits and a doubly quantised scale for 64 of them (QLoRA, arXiv 2305.14314), or 8 bits."""
TILE_ELEMENTS = 1 << 26
"""Logits of a tile (engine/tiles.py), of which no others exist: 256 MB in FP32, still hundreds of tokens for the largest vocabularies."""
STATE_BYTES = 12
"""An element's FP32 master and both moments."""
BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default."""
RUNTIME_BYTES = {True: 1 * GIB, False: 9 * GIB // 10}
"""A GPU's context, kernels and NCCL's buffers; on CPUs a process that has torch, DeepSpeed and transformers imported."""


@dataclass(frozen=True)
class Place:
    """Where the ranks are."""

    world_size: int
    ranks_per_node: int
    gpu: bool
    partition: int = 1
    """Ranks that hold one more whole copy of the base weights among them (zero_hpz_partition_size); 1: none."""


@dataclass(frozen=True)
class Item:
    """`certain`: follows from shapes alone; else it depends on kernels and allocators, and is counted half before a run is refused."""

    name: str
    size_bytes: int
    certain: bool


def estimate(shape: ModelShape, settings: Settings, place: Place) -> list[Item]:
    """What one rank's device holds at the worst moment of a step."""
    return [item for item in [*_states(shape, settings, place), *_working_set(shape, settings, place)] if item.size_bytes > 0]


def _states(shape: ModelShape, settings: Settings, place: Place) -> list[Item]:
    """Weights, gradients and optimizer state: 2 + 2 + 12 bytes an element in BF16, sharded by stage (ZeRO, arXiv 1910.02054)."""
    element = settings.element_bytes
    ranks, stage = place.world_size, settings.zero_stage
    weights = base_bytes(shape, settings)
    trained = trained_elements(shape, settings)
    full = settings.method is Method.FULL
    of_ranks = f" / {ranks} ranks" if ranks > 1 else ""
    stage3 = stage is ZeroStage.STAGE3
    gradients = trained * element // (1 if stage is ZeroStage.STAGE1 else ranks)
    offloaded = settings.offload is Offload.CPU
    mapped = ranks == 1 and not stage3 and not place.gpu  # from the file: the kernel may drop what it can read again
    return [
        Item(f"weights{of_ranks if stage3 else ''}", weights // (ranks if stage3 else 1), not mapped),
        Item(f"second copy / {place.partition} ranks of a node", weights // place.partition if place.partition > 1 else 0, True),
        Item("adapter", 0 if full else trained * element // (ranks if stage3 else 1), True),
        Item(f"gradients{'' if stage is ZeroStage.STAGE1 else of_ranks}", gradients, True),
        Item(f"FP32 masters and moments{of_ranks}", 0 if offloaded else STATE_BYTES * trained // ranks, True),
        Item(f"a save's copy{of_ranks}", 0 if place.gpu else snapshot_bytes(shape, settings, ranks), True),
    ]


def snapshot_bytes(shape: ModelShape, settings: Settings, world_size: int) -> int:
    """Of host memory that a rank keeps for the copy of its state that a save is written from."""
    element = STATE_BYTES if settings.content is Content.FULL else settings.element_bytes
    return element * trained_elements(shape, settings) // world_size


def bucket_elements(trained: int) -> int:
    """Of the buffer in which DeepSpeed reduces gradients. It is allocated whole, so that its default would be 1 GB beside an adapter's 20 MB."""
    return max(1, min(BUCKET_ELEMENTS, trained))


def _working_set(shape: ModelShape, settings: Settings, place: Place) -> list[Item]:
    """What exists only while a step runs."""
    element = settings.element_bytes
    tokens = settings.max_length * settings.micro_batch_size
    checkpointed = settings.gradient_checkpointing
    gathered = 2 * shape.largest_module * element if settings.zero_stage is ZeroStage.STAGE3 and place.world_size > 1 else 0
    folded = shape.adapted(settings.adapter.target_parameters) if settings.method is Method.LORA else []
    note = "with" if checkpointed else "without"
    return [
        Item(
            f"activations of {tokens} tokens, {note} gradient checkpointing", activation_bytes(shape, tokens, element, checkpointed), False
        ),
        Item("bucket of gradients that are reduced", bucket_elements(trained_elements(shape, settings)) * element, False),
        Item("tile of logits", 12 * min(tokens * shape.vocabulary, TILE_ELEMENTS), False),
        Item("gathered weights of the largest layer, twice", gathered, False),
        Item("experts folded with their adapter", 2 * max((weight.numel for weight in folded), default=0) * element, False),
        Item("CUDA and NCCL" if place.gpu else "the process itself", RUNTIME_BYTES[place.gpu], False),
    ]


def base_bytes(shape: ModelShape, settings: Settings) -> int:
    """Of all the base model's weights. Quantisation spares embeddings, norms and the head, as bitsandbytes does."""
    element = settings.element_bytes
    packed = sum(weight.numel for weight in shape.packable)
    return round(packed * QUANTISED_BYTES.get(settings.quantization, element) + (shape.numel - packed) * element)


def trained_elements(shape: ModelShape, settings: Settings) -> int:
    """Of an adapter: rank × (inputs + outputs) a linear layer, that for each expert of a stack, and whole layers; else all."""
    if settings.method is Method.FULL:
        return shape.numel
    adapter = settings.adapter
    layers = [weight for weight in shape.adapted(adapter.target_modules) if weight.linear]
    stacks = [weight for weight in shape.adapted(adapter.target_parameters) if len(weight.shape) == 3]
    magnitudes = sum(weight.shape[0] for weight in layers) if adapter.dora else 0
    low_rank = sum(adapter.rank * sum(weight.shape) for weight in layers)
    low_rank += sum(adapter.rank * weight.shape[0] * (weight.shape[1] + weight.shape[2]) for weight in stacks)
    return low_rank + magnitudes + sum(weight.numel for weight in shape.adapted(adapter.modules_to_save))


def activation_bytes(shape: ModelShape, tokens: int, element: int, checkpointed: bool) -> int:
    """Tensors that autograd keeps from the forward to the backward pass, counted in a transformers decoder layer without dropout:
    queries, attention's output, keys and values; the gated feed-forward's three products; two norms, which compute in FP32; and
    four tensors of the hidden size. With gradient checkpointing each layer keeps its input, and one layer at a time all of it.
    No term grows with the square of the length: attention kernels keep none (FlashAttention, arXiv 2205.14135).
    """
    routed = 2 * shape.experts_per_token * shape.hidden
    layer = element * (2 * shape.query + 2 * shape.key_value + 3 * shape.intermediate + 4 * shape.hidden + routed) + 8 * shape.hidden
    if checkpointed:
        return tokens * (shape.layers * shape.hidden * element + layer)
    return tokens * shape.layers * layer
