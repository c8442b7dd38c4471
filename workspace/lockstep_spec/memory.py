"""Bytes that a rank needs on its device, item by item (pure). docs/how-to/memory.md states the formulas and their sources."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from lockstep_spec.activations import (
    again_bytes,
    attention_bytes,
    folded_bytes,
    gradient_bytes,
    kept_bytes,
    last_rows_bytes,
    layer_bytes,
    logits_bytes,
    score_gradient_bytes,
    tile_bytes,
    tokens_of,
    whole_logits,
)
from lockstep_spec.choices import Content, Method, Offload, Quantization, ZeroStage
from lockstep_spec.settings import ParameterPlace, Settings
from lockstep_spec.shape import ModelShape, Weight, layer_of, matching_names
from lockstep_spec.training import LoraConfig

GIB = 1 << 30
NF4_BYTES = 0.516
"""Bytes an element of a quantized weight: 4 bits and a doubly quantized scale for 64 of them (QLoRA, arXiv 2305.14314), or 8 bits."""
STATE_BYTES = 12
"""An element's FP32 master and both moments."""
BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default."""
UPDATE_BYTES = 8
"""An element of the optimizer's state: the root of its second moment, and the update."""
BUCKET = "bucket of gradients that are reduced"
"""An item. Under Stage3 it is there all the time, else in backward passes."""
RUNTIME_BYTES = {True: 1_800_000_000, False: 9 * GIB // 10}
"""Bytes that a GPU gives a process beside its tensors: 1.80 GB on an H200 with CUDA 13.0 (docs/benchmarks.md); on CPUs a process that has
torch, DeepSpeed and transformers imported.
"""
NCCL_BYTES = 2 * 32 * (4 << 20)
"""Bytes of one communicator: buffers of 4 MiB (NCCL_BUFFSIZE), to send and to receive, for each of at most 32 channels (NCCL_MAX_CTAS)."""
FRAGMENTED_SHARE = 0.06
"""Share of what tensors take on a GPU that the allocator holds between them: 5.3 % at most of three models on an H200, rounded up."""


@dataclass(frozen=True)
class Place:
    """Ranks and the devices that they are on."""

    world_size: int
    ranks_per_node: int
    gpu: bool
    partition: int = 1
    """Ranks that hold one more whole copy of the base weights among them (zero_hpz_partition_size); 1: none."""
    shared: bool = False
    """True if the GPU's memory is the machine's, as in a DGX Spark: what is kept in host memory takes room of the same."""


@dataclass(frozen=True)
class Item:
    """`certain`: follows from shapes alone; else it depends on kernels and allocators, and is counted half before a run is refused."""

    name: str
    size_bytes: int
    certain: bool


def estimate(shape: ModelShape, settings: Settings, place: Place) -> list[Item]:
    """Items that one rank's device holds at the worst moment of a step: when the loss is computed, within a backward pass, or at the
    update.
    """
    moments = (_at_the_loss(shape, settings, place), _in_the_backward_pass(shape, settings, place), _at_the_update(shape, settings, place))
    worst = max(moments, key=lambda items: sum(item.size_bytes for item in items))
    tensors = [*_states(shape, settings, place), *worst]
    return [item for item in [*tensors, *_beside_tensors(tensors, place)] if item.size_bytes > 0]


def _states(shape: ModelShape, settings: Settings, place: Place) -> list[Item]:
    """Weights, gradients and optimizer state: 2 + 4 + 12 bytes an element in BF16, sharded by stage (ZeRO, arXiv 1910.02054)."""
    element = settings.element_bytes
    ranks, stage = place.world_size, settings.zero_stage
    weights = base_bytes(shape, settings)
    trained = trained_elements(shape, settings)
    full = settings.method is Method.FULL
    of_ranks = f" / {ranks} ranks" if ranks > 1 else ""
    stage3 = stage is ZeroStage.STAGE3
    gradients = trained * settings.gradient_bytes // (1 if stage is ZeroStage.STAGE1 else ranks)
    offloaded = settings.offload is Offload.CPU and not place.shared
    mapped = ranks == 1 and not stage3 and not place.gpu  # from the file: the kernel may drop what it can read again
    here = 0 if stage3 and _elsewhere(settings, place) else 1
    return [
        Item(f"weights{of_ranks if stage3 else ''}", here * weights // (ranks if stage3 else 1), not mapped),
        Item(f"second copy / {place.partition} ranks of a node", here * weights // place.partition if place.partition > 1 else 0, True),
        Item("adapter", 0 if full else here * trained * element // (ranks if stage3 else 1), True),
        Item(f"gradients{'' if stage is ZeroStage.STAGE1 else of_ranks}", gradients, True),
        Item(BUCKET, _bucket(trained, settings) * element if stage3 else 0, False),
        Item(f"FP32 masters and moments{of_ranks}", 0 if offloaded else STATE_BYTES * trained // ranks, True),
        Item(f"a save's copy{of_ranks}", 0 if place.gpu and not place.shared else snapshot_bytes(shape, settings, ranks), True),
    ]


def snapshot_bytes(shape: ModelShape, settings: Settings, world_size: int) -> int:
    """Bytes of host memory that a rank keeps for the copy of its state that a save is written from."""
    element = STATE_BYTES if settings.content is Content.FULL else settings.element_bytes
    return element * trained_elements(shape, settings) // world_size


def _elsewhere(settings: Settings, place: Place) -> bool:
    """True if the shards of the weights take no memory of the rank's device."""
    return settings.parameters is ParameterPlace.NVME or (settings.parameters is ParameterPlace.CPU and place.gpu and not place.shared)


def _bucket(trained: int, settings: Settings) -> int:
    return bucket_elements(trained) if settings.bucket_elements is None else settings.bucket_elements


def bucket_elements(trained: int) -> int:
    """Elements of the buffer in which DeepSpeed reduces gradients. It is allocated whole, so that its default would be 1 GB beside an
    adapter's 20 MB.
    """
    return max(1, min(BUCKET_ELEMENTS, trained))


def _at_the_loss(shape: ModelShape, settings: Settings, place: Place) -> list[Item]:
    """All that autograd keeps, and the logits."""
    tokens = tokens_of(settings)
    logits = (
        Item(f"whole logits of {tokens} tokens, which this model's loss needs", logits_bytes(shape, settings), certain=False)
        if whole_logits(shape, settings)
        else Item("tile of logits", tile_bytes(shape, settings), certain=False)
    )
    return [
        Item(_activations(shape, settings), kept_bytes(shape, settings) + last_rows_bytes(shape, settings), certain=False),
        logits,
        Item(
            "gathered weights",
            gathered_elements(shape, settings, place, shape.vocabulary * shape.hidden) * settings.element_bytes,
            certain=False,
        ),
        *_while_computing(shape, settings),
    ]


def _in_the_backward_pass(shape: ModelShape, settings: Settings, place: Place) -> list[Item]:
    """All that autograd keeps, as the last layer's backward pass begins, and the most of what comes then: the weights of its feed-forward
    part are gathered, and if that is computed again, before it is; its gradients; those of attention's scores, when it is done.
    """
    element = settings.element_bytes
    stage3 = settings.zero_stage is ZeroStage.STAGE3
    attention, layer = attention_bytes(shape, settings), layer_bytes(shape, settings)
    copied = shape.copied_module * element if stage3 and place.world_size > 1 else 0
    bucket = 0 if stage3 else _bucket(trained_elements(shape, settings), settings) * bucket_bytes(settings)
    moments = [
        (attention, [Item("gathered weights, copied out of one buffer", copied, certain=False)]),
        (attention, [Item("gradients of attention's scores", score_gradient_bytes(shape, settings), certain=False)]),
        (
            layer,
            [
                Item("gradients of one layer's activations", gradient_bytes(shape, settings), certain=False),
                Item(BUCKET, bucket, certain=False),
            ],
        ),
    ]
    again = [(again_bytes(shape, settings, needed), items) for needed, items in moments]
    most, then = max(again, key=lambda moment: moment[0] + sum(item.size_bytes for item in moment[1]))
    return [
        Item(_activations(shape, settings), kept_bytes(shape, settings) + most, certain=False),
        Item("gathered weights", gathered_elements(shape, settings, place, shape.largest_module) * element, certain=False),
        *then,
        *_while_computing(shape, settings),
    ]


def bucket_bytes(settings: Settings) -> int:
    """Bytes of an element of the bucket under Stage1 and Stage2: Stage1 reduces sums, and to reduce beside the backward pass there are two
    buckets.
    """
    each = settings.gradient_bytes if settings.zero_stage is ZeroStage.STAGE1 else settings.element_bytes
    overlaps = settings.method is Method.FULL if settings.overlap is None else settings.overlap
    return each * (2 if overlaps else 1)


def _while_computing(shape: ModelShape, settings: Settings) -> list[Item]:
    """Items of the forward and of the backward pass."""
    return [Item("experts folded with their adapter", folded_bytes(shape, settings), certain=False)]


def _at_the_update(shape: ModelShape, settings: Settings, place: Place) -> list[Item]:
    """Gradients in FP32, where they aren't summed so, and the optimizer's own temporaries; with offload it computes on the CPU."""
    each = UPDATE_BYTES + STATE_BYTES // 3
    update = 0 if settings.offload is Offload.CPU else each * trained_elements(shape, settings) // place.world_size
    return [Item("the update's temporaries", update, certain=False)]


def _beside_tensors(tensors: list[Item], place: Place) -> list[Item]:
    """Memory that no tensor takes."""
    if not place.gpu:
        return [Item("the process itself", RUNTIME_BYTES[False], certain=False)]
    groups = communicators(place)
    return [
        Item("the process itself", RUNTIME_BYTES[False] if place.shared else 0, certain=False),
        Item("CUDA", RUNTIME_BYTES[True], certain=False),
        Item(f"NCCL's buffers of {groups} communicators", groups * NCCL_BYTES, certain=False),
        Item("reserve for fragmentation", round(FRAGMENTED_SHARE * sum(item.size_bytes for item in tensors)), certain=False),
    ]


def communicators(place: Place) -> int:
    """torch's and DeepSpeed's of all ranks, and with a second copy of the weights that of a node's."""
    return 0 if place.world_size == 1 else 3 if place.partition > 1 else 2


def gathered_elements(shape: ModelShape, settings: Settings, place: Place, module: int) -> int:
    """Elements of weights that are whole at the same time under Stage3: those of the `module` at hand, and what is kept or prefetched
    around it.
    """
    if settings.zero_stage is not ZeroStage.STAGE3 or place.world_size == 1:
        return 0
    return module + min(max(0, most_gathered(shape, settings.live_elements) - module), shape.numel - module)


def _activations(shape: ModelShape, settings: Settings) -> str:
    return f"activations of {tokens_of(settings)} tokens, recomputing {settings.recomputed.words(shape.layers)}"


def base_bytes(shape: ModelShape, settings: Settings) -> int:
    """Bytes of all the base model's weights. Quantization spares embeddings, norms and the head, as bitsandbytes does."""
    element = settings.element_bytes
    packed = sum(weight.numel for weight in shape.packable)
    each = NF4_BYTES if settings.quantization is Quantization.NF4 else element
    return round(packed * each + (shape.numel - packed) * element)


def trained_elements(shape: ModelShape, settings: Settings) -> int:
    """Elements that are trained: those of the adapter, or all that text passes."""
    if settings.method is Method.FULL:
        return sum(weight.numel for weight in shape.weights if not weight.tower)
    return sum(trained_parts((*shape.weights, *shape.tied), settings.adapter).values())


def trained_parts(weights: Iterable[Weight], adapter: LoraConfig) -> dict[str, int]:
    """Layer or stack of experts → elements that an adapter trains of it: rank × (inputs + outputs) of a linear layer, that for each expert
    of a stack, or all of a layer that is trained whole, with the layers in it.
    """
    parts: dict[str, int] = {}
    for weight in weights:
        if weight.tower:
            continue
        modules = itertools.accumulate(weight.module.split("."), "{}.{}".format)
        if whole := next(iter(matching_names(adapter.modules_to_save, modules)), None):
            parts[whole] = parts.get(whole, 0) + weight.numel
        if weight.linear and matching_names(adapter.target_modules, [weight.module]):
            parts[weight.module] = adapter.rank * sum(weight.shape) + (weight.shape[0] if adapter.dora else 0)
        if len(weight.shape) == 3 and matching_names(adapter.target_parameters, [weight.name]):
            parts[weight.name] = adapter.rank * weight.shape[0] * sum(weight.shape[1:])
    return parts


LIVE_ELEMENTS = 1_000_000_000
AHEAD_ELEMENTS = 50_000_000
"""Elements of the weights that Stage3 may have gathered at once, and that it fetches ahead: DeepSpeed's defaults, below which nothing is
gained, since smaller models stay gathered for longer, and are gathered less often.

DeepSpeed fetches ahead only as long as fewer elements than its limit are gathered. The experts of one layer of a large mixture of experts
exceed the default alone, so that nothing would be fetched while they compute; and what is fetched ahead by default is a quarter of a layer
of an 8B model. So both follow from the model's largest layer.
"""


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
    """Elements that are gathered at the same time where a module is not larger. `stated`: the limit of the raw settings, where they have
    one.
    """
    if stated is not None:
        return stated
    live = live_elements(shape)
    return live if live == LIVE_ELEMENTS else live + _largest(shape)


def live_elements(shape: ModelShape) -> int:
    """Gathered before DeepSpeed fetches no more ahead: two layers with that weight by which it may exceed its limit."""
    return max(LIVE_ELEMENTS, 2 * max(layer_elements(shape), shape.largest_module) - _largest(shape))


def _largest(shape: ModelShape) -> int:
    return max((weight.numel for weight in shape.weights), default=0)
