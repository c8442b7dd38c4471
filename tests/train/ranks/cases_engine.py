"""Rank functions of the engine's tests: the loss, the precisions, steps left out."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator
from deepspeed.utils import safe_get_full_grad
from deepspeed.utils.groups import _clone_world_group
from rank_cases import CountCollectives, add_result, assembled, with_own_keys
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from lockstep_spec.choices import ZeroStage
from lockstep_train.assemble import assemble
from lockstep_train.base import ranks as engine_ranks
from lockstep_train.base.errors import TrainerError
from lockstep_train.base.runfile import rank_environment, read_run
from lockstep_train.data.sequences.batches import Batch
from lockstep_train.data.tokens.encode import IGNORED
from lockstep_train.engine import loss as loss_module
from lockstep_train.engine.loss import TokenLoss, tile_head, whole_loss
from lockstep_train.evaluate import evaluate
from lockstep_train.loop import train
from lockstep_train.memory import agree
from lockstep_train.report import Reporter
from lockstep_train.run import Run
from lockstep_train.watch.watchdog import StopSignal
from lockstep_train.zero import zero_access
from lockstep_train.zero.start import prepare_deepspeed
from support.rounding import SAME_LOSS, gradient_roundings, tolerance


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation made."""

    numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return output


class Gathers:
    """Counts how often DeepSpeed gathers one parameter."""

    def __init__(self, parameter: Any) -> None:
        name = "_PartitionedParameterCoordinator__all_gather_params"
        real = getattr(Coordinator, name)
        self.count = 0

        def counted(coordinator: Any, params: Any, forward: bool) -> None:
            gone = ZeroParamStatus.NOT_AVAILABLE
            self.count += any(item.ds_id == parameter.ds_id and item.ds_status == gone for item in params)
            real(coordinator, params, forward)

        setattr(Coordinator, name, counted)


def tiled_loss_of_a_run() -> None:
    """Under Stage3: the loss beside the one from whole logits, the largest tensor of each, and the gathers of the last layer."""
    run = assembled()
    loss_module.TILE_ELEMENTS = 11 * 258
    ids = torch.randint(0, 258, (2, 64), generator=torch.Generator().manual_seed(run.ranks.rank))
    batch = Batch(ids, ids, torch.ones_like(ids, dtype=torch.bool))
    tokens = 2 * 63
    gathers = Gathers(run.engine.module.get_base_model().lm_head.weight)
    found = {}
    for name, loss_of in {"whole": lambda item: whole_loss(run.engine(**item.inputs).logits, item.labels), "tiled": run.loss}.items():
        for _ in range(2):  # the first pass is what DeepSpeed records as its trace
            gathers.count = 0
            with Largest() as largest:
                loss = loss_of(batch)
                run.engine.backward(loss, scale_wrt_gas=False)
            run.engine.step()
        found[name] = (largest.numel, gathers.count, float(loss.detach()))
    assert found["whole"][0] >= tokens * 258, found
    assert found["tiled"][0] < tokens * 258, found
    assert found["whole"][1] == 2, found
    assert found["tiled"][1] == 1, found
    with torch.no_grad():
        whole, tiled = whole_loss(run.engine(**batch.inputs).logits, batch.labels), run.loss(batch)
    torch.testing.assert_close(tiled, whole, rtol=SAME_LOSS, atol=0)
    engine_ranks.leave()


def tiled_loss_beside_plain_one() -> None:
    """Loss and every gradient, for layers that are frozen, trained, tied and with a bias, in FP32 and BF16."""
    shape: dict[str, Any] = {"vocab_size": 90, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    loss_module.TILE_ELEMENTS = 4 * 90
    ids = torch.randint(0, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.arange(9) < torch.tensor([[4], [0]]), IGNORED)
    makers: list[Any] = [
        lambda: LlamaForCausalLM(LlamaConfig(**shape)),
        lambda: LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True)),
        lambda: PhiForCausalLM(PhiConfig(**shape)),
    ]
    for make in makers:
        for trained in (False, True):
            for dtype in (torch.float32, torch.bfloat16):
                torch.manual_seed(1)
                model = make().to(dtype).eval()
                model.get_output_embeddings().requires_grad_(trained)
                batch = Batch(ids, labels, torch.ones_like(ids, dtype=torch.bool))
                plain, gradients = loss_and_gradients(model, whole_loss(model(**batch.inputs).logits, labels))
                head, note = tile_head(model)
                assert note is None
                tiled, same = loss_and_gradients(model, TokenLoss(model, head)(batch))
                assert gradients.keys() == same.keys()
                of_loss, of_gradient = head_tolerances(dtype, learned=5 + 8, results=sum(item.numel() for item in gradients.values()))
                torch.testing.assert_close(tiled, plain, rtol=of_loss, atol=0)
                for name, gradient in gradients.items():
                    assert (same[name] - gradient).abs().max() <= of_gradient * gradient.abs().max(), (name, dtype)
    unlearned = Batch(ids, torch.full_like(ids, IGNORED), torch.ones_like(ids, dtype=torch.bool))
    nothing, zeros = loss_and_gradients(model, TokenLoss(model, head)(unlearned))
    assert nothing == 0
    assert all((gradient == 0).all() for gradient in zeros.values())


def head_tolerances(dtype: torch.dtype, learned: int, results: int) -> tuple[float, float]:
    """Of the summed loss of `learned` tokens and of its gradients, for the last layer of the test above, everything before it being the
    same.

    In FP32: sums over the hidden size, the words and the tokens. In BF16: the logits, and on the way back the change of the logits, and
    what it gives the rows and the weights, are rounded.
    """
    if dtype == torch.float32:
        return tolerance(24 + 90 + learned), tolerance(gradient_roundings(24 + 90, learned), results=results)
    return tolerance(1, "BF16", terms=learned), tolerance(4, "BF16", results=results)


def loss_and_gradients(model: Any, loss: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    (loss * 3).backward()
    return loss.detach(), {name: item.grad.clone() for name, item in model.named_parameters() if item.grad is not None}


def models_that_change_their_logits() -> None:
    shape: dict[str, Any] = {"vocab_size": 90, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    for model in (Gemma2ForCausalLM(Gemma2Config(**shape, head_dim=8)), GraniteForCausalLM(GraniteConfig(**shape, logits_scaling=3.0))):
        head, note = tile_head(model)
        assert head is None
        assert note == "the model does more to the logits after its last layer"


def timeouts_of_groups(timeout_seconds: int) -> None:
    """The world's, and that of the group which DeepSpeed makes of it."""
    engine_ranks.join(rank_environment(), timeout_seconds)
    prepare_deepspeed()
    for group in (dist.group.WORLD, _clone_world_group()):
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        assert timeout.total_seconds() == timeout_seconds, timeout
    engine_ranks.leave()


def train_each(variants: dict[str, dict[str, Any]], output: str) -> None:
    """Train each variant's `run` in this one group, with its `poison`, or where a rank's device has `memory` bytes; rank 0 adds how each
    ended.
    """
    environment = rank_environment()
    ranks = engine_ranks.join(environment)
    for name, variant in variants.items():
        own = with_own_keys(ranks, name)
        with stated_memory(variant.get("memory")):
            ended = train_one(variant["run"], environment, own, variant.get("poison"))
        dist.barrier()
        if ranks.first:
            add_result(output, name, ended)
    engine_ranks.leave()


@contextlib.contextmanager
def stated_memory(size_bytes: int | None) -> Iterator[None]:
    real = agree.device_bytes
    agree.device_bytes = real if size_bytes is None else lambda *_: size_bytes
    try:
        yield
    finally:
        agree.device_bytes = real


class AttentionCalls(TorchDispatchMode):
    """Counts how often attention's kernel computes forward in training."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.count, self._model = 0, model

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self._model.training and function.name() == "aten::_scaled_dot_product_flash_attention_for_cpu"
        return function(*args, **(kwargs or {}))


def note_gathered(engine: Any) -> list[int]:
    """Grows with every backward pass by the bytes of frozen weights that are whole after it; those that Stage3 doesn't shard count as
    none.
    """
    found: list[int] = []
    real = engine.backward

    def noted(*arguments: Any, **options: Any) -> Any:
        result = real(*arguments, **options)
        frozen = [parameter for parameter in engine.module.parameters() if hasattr(parameter, "ds_status") and not parameter.requires_grad]
        found.append(sum(parameter.data.nbytes for parameter in frozen))
        return result

    engine.backward = noted
    return found


def train_one(path: str, environment: Any, ranks: Any, poison: str | None) -> dict[str, Any]:
    get_accelerator().is_fp16_supported = lambda: True  # torch's CPU computes in it, only slowly; DeepSpeed goes by fast units
    run = assemble(read_run(Path(path)), environment, ranks, Reporter(None, environment.rank))
    if poison is not None:
        {"loss": poison_loss, "gradient": poison_gradient}[poison](run)
    layer, gathered, attention = count_forwards(run), note_gathered(run.engine), AttentionCalls(run.engine.module)
    before = {name: value.clone() for name, value in zero_access.gather_masters(run.engine)}
    error = None
    try:
        with attention:
            train(run, StopSignal())
    except TrainerError as problem:
        error = f"{type(problem).__name__}: {problem}"
    after = dict(zero_access.gather_masters(run.engine))
    result = {
        "error": error,
        "layer": len(layer),
        "attention": attention.count,
        "gathered": gathered,
        "recomputed": [run.recomputed.level.name, run.recomputed.layers],
        "masters": hashlib.sha256(b"".join(after[name].cpu().numpy().tobytes() for name in sorted(after))).hexdigest(),
        "moved": any(not torch.equal(before[name], after[name]) for name in before),
        "finite": all(bool(value.isfinite().all()) for value in after.values()),
        "bucket": run.engine.optimizer.reduce_bucket_size,
        "trained": sum(value.numel() for value in after.values()),
        "updates": zero_access.optimizer_step(run.engine),
        "device": (
            {str(fragment.tensors["exp_avg"].device) for fragment in zero_access.fragments(run.engine)} == {"cpu"} if not error else None
        ),
    }
    run.saver.finish()
    run.reporter.close()
    run.engine.destroy()
    unset_hf_deepspeed_config()
    return result


def count_forwards(run: Run) -> list[None]:
    """Grows with every forward pass of the first decoder layer in training."""
    found: list[None] = []
    first = next(module for name, module in run.engine.module.named_modules() if name.endswith("layers.0"))
    first.self_attn.register_forward_hook(lambda module, *_: found.append(None) if module.training else None)
    return found


def poison_loss(run: Run) -> None:
    """NaN on rank 1 at the second step."""
    real, calls = run.loss, {"count": 0}

    def poisoned(*batch: Any) -> torch.Tensor:
        calls["count"] += 1
        loss: torch.Tensor = real(*batch)
        return loss * math.nan if calls["count"] == 2 and run.ranks.rank == 1 else loss

    object.__setattr__(run, "loss", poisoned)


def poison_gradient(run: Run) -> None:
    """A gradient that isn't finite, of a finite loss, on rank 1 at the second step."""
    calls = {"count": 0}
    parameter = zero_access.trainable(run.engine)[0][1]

    def poisoned(gradient: torch.Tensor) -> torch.Tensor:
        calls["count"] += 1
        return gradient * math.inf if calls["count"] == 2 and run.ranks.rank == 1 else gradient

    parameter.register_hook(poisoned)


def evaluate_subsets(counts: list[int], output: str) -> None:
    """The evaluation loss of the first so many training samples."""
    run = assembled()
    with CountCollectives() as collectives:
        found = [evaluate(run.engine, run.loss, run.dataset.training[:count], 2, run.tokenizer.pad, run.ranks) for count in counts]
    if run.config.training.zero_stage is not ZeroStage.STAGE3:
        assert collectives.seen == ["c10d.allreduce_.default"] * len(counts), collectives.seen
    if run.ranks.first:
        Path(output).write_text(json.dumps(found))
    engine_ranks.leave()


def sum_small_gradients(above: float) -> None:
    """A gradient and, after it, 8 of its 512th part, each of which a sum in BF16 rounds away: the sum is so much above the first
    gradient.
    """
    run = assembled()
    ids = torch.randint(0, 258, (1, 32), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, ids, torch.ones_like(ids, dtype=torch.bool))
    zero_access.set_learning_rate(run.engine, 0.0)
    sums = []
    for scales in ([1.0], [1.0, *[2.0**-9] * 8]):
        zero_access.set_counters(run.engine, 0, len(scales), len(scales) * run.ranks.world_size)
        for micro, scale in enumerate(scales, 1):
            run.engine.backward(run.loss(batch) * scale, scale_wrt_gas=False)
            if micro < len(scales):
                run.engine.step()
        gradients = [safe_get_full_grad(parameter) for _, parameter in zero_access.trainable(run.engine)]
        assert all(gradient is not None for gradient in gradients)
        sums.append(torch.cat([gradient.double().flatten() for gradient in gradients]))
        run.engine.step()
    first, whole = sums
    assert float(first.abs().max()) > 0
    share = float((whole - first).abs().sum() / first.abs().sum())
    assert abs(share - above) <= 2.0**-8, share  # ranks send the sum in BF16
    engine_ranks.leave()
