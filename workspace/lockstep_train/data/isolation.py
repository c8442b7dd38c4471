"""Attention that keeps packed documents apart, and a test that it does.

| attention | how it tells documents apart | cost |
|---|---|---|
| flash attention 2 or 3 (CUDA, Ampere or newer, BF16 or FP16, installed) | boundaries given to its varlen kernel; documents of all rows in one list | grows with each document's own length |
| SDPA, elsewhere | a block mask that transformers derives from the positions of each row | a mask of batch × maxLength², and no flash kernel |

Whether documents in one sequence see each other depends on the model's code, the attention chosen and the libraries' versions, and a leak
shows in no loss curve: documents that saw their neighbors' tokens moved logits by 0.3 and more, silently. So it is measured at every start, on
the model that is about to be trained.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist

from lockstep_spec.choices import Precision
from lockstep_spec.training import TrainingConfig
from lockstep_train.base.errors import ConfigError, may_pass
from lockstep_train.base.limits import Say
from lockstep_train.data.sequences.batches import collate
from lockstep_train.data.tokens.encode import IGNORED, Example

AMPERE = (8, 0)
"""The oldest GPUs that flash attention's kernels run on, as a compute capability."""
HALF = {Precision.BF16, Precision.FP16}


def choose_attention(model: Any, training: TrainingConfig, device: torch.device, say: Say) -> None:
    """Set the model's attention with packing, and say which; without packing, transformers' choice stays."""
    if not training.data.packing:
        return
    chosen = varlen_attention() if flash_possible(model, training.precision, device) else None
    if chosen is not None:
        model.set_attn_implementation(chosen)
        say(f"Packing: documents are kept apart by the varlen kernel of {chosen}")
        return
    missing = (
        ""
        if device.type == "cpu"
        else "; flash attention, which needs no mask, is not installed or does not fit this model, GPU and precision"
    )
    say(f"Packing: documents are kept apart by a block mask for {model.config._attn_implementation} attention{missing}")


def flash_possible(model: Any, precision: Precision, device: torch.device) -> bool:
    if device.type != "cuda" or precision not in HALF or not getattr(model, "_supports_flash_attn", False):
        return False
    return torch.cuda.get_device_capability(device) >= AMPERE


def varlen_attention() -> str | None:
    """The best flash attention that is installed."""
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    if is_flash_attn_3_available():
        return "flash_attention_3"
    return "flash_attention_2" if is_flash_attn_2_available() else None


DOCUMENT_TOKENS = 24
LARGEST_SHARE, LARGEST_SHARE_HALF = 1e-3, 2e-2
"""Largest share of what a leak would do; the second one in BF16 and FP16. Attention gives a masked token the weight 0 exactly, so the difference
is 0 to the bit in dense models. Kernels that group tokens by expert may round differently when other tokens change: 5e-7 of 5
was seen in FP32; in half precision one such step is 8e-3 of a logit."""

_KERNEL = re.compile(r"flash.?att|no kernel image|not implemented for", re.IGNORECASE)


@dataclass(frozen=True)
class Isolation:
    """Movement of a document's logits when the document before it was changed."""

    apart: float
    """Movement when packed as in training."""
    together: float
    """Movement within one document: what a leak does."""
    largest_share: float


def check_isolation(engine: Any, examples: Any, rows: int, device: torch.device) -> Isolation:
    """Test the isolation. Raises ConfigError, on every rank alike, on a leak. All ranks run the same four forward passes, as Stage3 needs.

    `examples`: the packed sequences; `rows`: the micro-batch size, since what is right for one row may leak with more.
    """
    vocabulary = int(engine.module.config.get_text_config().vocab_size)
    ids = numpy.resize(examples[0].ids[:DOCUMENT_TOKENS], 2 * DOCUMENT_TOKENS)
    changed = ids.copy()
    changed[:DOCUMENT_TOKENS] = (changed[:DOCUMENT_TOKENS] + 1 + numpy.arange(DOCUMENT_TOKENS)) % vocabulary
    halves = (DOCUMENT_TOKENS, DOCUMENT_TOKENS)
    training = engine.training
    engine.eval()
    try:
        with torch.no_grad():
            outputs = [
                _second_half(engine, tokens, documents, rows, device)
                for documents in (halves, (2 * DOCUMENT_TOKENS,))
                for tokens in (ids, changed)
            ]
    except (ValueError, RuntimeError) as error:
        if may_pass(error) or (isinstance(error, RuntimeError) and not _lacks_kernel(error)):
            raise
        raise ConfigError(
            f"training.data.packing can't be used with this model: {str(error).splitlines()[0]}; set packing to false"
        ) from error
    engine.train(training)
    half = outputs[0].dtype is not torch.float32
    outputs = [logits.float() for logits in outputs]
    moved = torch.stack([(outputs[0] - outputs[1]).abs().max(), (outputs[2] - outputs[3]).abs().max()])
    dist.all_reduce(moved, dist.ReduceOp.MAX)
    isolation = Isolation(float(moved[0]), float(moved[1]), LARGEST_SHARE_HALF if half else LARGEST_SHARE)
    refuse_leak(isolation)
    return isolation


def _lacks_kernel(error: RuntimeError) -> bool:
    """Return True if the attention chosen doesn't run here. Other errors say nothing of packing."""
    return isinstance(error, NotImplementedError) or _KERNEL.search(str(error)) is not None


def _second_half(engine: Any, ids: Any, documents: tuple[int, ...], rows: int, device: torch.device) -> torch.Tensor:
    example = Example(ids, numpy.full_like(ids, IGNORED), "the isolation test", documents)
    logits: torch.Tensor = engine(**collate([example] * rows, example, 0, device).inputs).logits
    return logits[:, DOCUMENT_TOKENS:]


def refuse_leak(isolation: Isolation) -> None:
    """Raise ConfigError for a leak, and where no effect was seen at all."""
    if not isolation.together > 0:  # also NaN
        raise ConfigError(
            "training.data.packing can't be used: with this model, one token shows no effect on the next, so Lockstep can't verify that documents are kept apart; set packing to false"
        )
    if not isolation.apart <= isolation.largest_share * isolation.together:
        raise ConfigError(
            f"training.data.packing can't be used with this model: changing one document moved the logits of the next one in the same sequence by {isolation.apart:.3g} "
            f"({isolation.together:.3g} without any separation); set packing to false"
        )
