"""Test that attention keeps the documents of one row apart (attention.py).

Whether documents in one sequence see each other depends on the model's code, the attention chosen and the libraries' versions, and a leak
shows in no loss curve: documents that saw their neighbors' tokens moved logits by 0.3 and more, silently. So it is measured at every start,
on the model that is about to be trained.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
import torch.distributed as dist

from lockstep_spec.choices import Batches
from lockstep_spec.training import TrainingConfig
from lockstep_train.base.errors import ConfigError, first_line, may_pass
from lockstep_train.base.limits import Say
from lockstep_train.data.sequences.batches import collate
from lockstep_train.data.tokens.encode import IGNORED, Example
from lockstep_train.model.attention import attention_of, by_document

NEEDS_MASK = "its attention needs a mask of whole rows"


def settle_batches(
    engine: Any, training: TrainingConfig, batches: Batches, examples: Any, rows: int, device: torch.device, say: Say
) -> Batches:
    """Test that documents are kept apart, and return how steps are divided: by rows where they aren't. A collective.

    `rows`: the micro-batch size of packed rows. Raises ConfigError, on every rank alike, if packed sequences can't be used.
    """
    packing = training.data.packing
    if batches is Batches.ROWS and not packing:
        return batches
    model, own = engine.module, by_document(engine.module)
    problem = NEEDS_MASK if own is None else isolation_problem(engine, examples, 1 if batches is Batches.TOKENS else rows, device)
    if problem and own is not None:
        model.set_attn_implementation(own.original)
    if problem and batches is Batches.TOKENS:
        batches = Batches.ROWS
        say(f"Batches: this model trains by rows, padded to the longest of a micro-batch, since documents can't be joined: {problem}")
    if problem and packing:
        problem = isolation_problem(engine, examples, rows, device)
    if problem and packing:
        raise ConfigError(f"training.data.packing can't be used with this model: {problem}; set packing to false")
    for kernel, reason in (own.refused if own is not None else {}).items():
        say(f"Attention: {kernel} isn't used here: {reason}")
    own = by_document(model)
    if packing or (batches is Batches.TOKENS and device.type == "cuda"):
        words = own.words() if own is not None else f"a block mask for {attention_of(model)} attention"
        say(f"Attention: documents are kept apart by {words}")
    return batches


DOCUMENT_TOKENS = 24
LARGEST_SHARE, LARGEST_SHARE_HALF = 1e-3, 2e-2
"""Largest share of what a leak would do; the second one in BF16 and FP16. Attention gives a masked token the weight 0 exactly, so dense
models differ by the rounding of sums in another order at most. Kernels that group tokens by expert may round differently when other tokens
change: 5e-7 of 5 was seen in FP32; in half precision one such step is 8e-3 of a logit.
"""

_KERNEL = re.compile(r"flash.?att|no kernel image|not implemented for", re.IGNORECASE)


def isolation_problem(engine: Any, examples: Any, rows: int, device: torch.device) -> str:
    """Return the reason why documents of one row aren't kept apart, the same on every rank; '' if they are. All ranks run the same forward
    pass, as Stage3 needs.

    The row holds the documents A, B, A', B, AB and A'B: B is the same at both places unless it sees what is before it or its positions run
    on. Within AB and A'B it shows what a leak does. `examples`: the run's sequences; `rows`: rows of the batch, since what is right for one
    row may leak with more.
    """
    vocabulary = int(engine.module.config.get_text_config().vocab_size)
    one, size = numpy.resize(examples[0].ids[:DOCUMENT_TOKENS], DOCUMENT_TOKENS), DOCUMENT_TOKENS
    pair = numpy.concatenate([one, one])
    changed = numpy.concatenate([(one + 1 + numpy.arange(size)) % vocabulary, one])
    ids = numpy.concatenate([pair, changed, pair, changed])
    example = Example(ids, numpy.full_like(ids, IGNORED), "the isolation test", (size,) * 4 + (2 * size,) * 2)
    try:
        with evaluating(engine):
            output: torch.Tensor = engine(**collate([example] * rows, example, 0, device).inputs).logits
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        lacks_kernel = not isinstance(error, RuntimeError) or isinstance(error, NotImplementedError) or _KERNEL.search(str(error))
        if may_pass(error) or not lacks_kernel:
            raise  # it says nothing of joined rows
        problem, share, moved = first_line(error), 0.0, torch.zeros(3, device=device)
    else:
        own = by_document(engine.module)
        problem = own.problem() if own is not None else ""
        share = LARGEST_SHARE if output.dtype is torch.float32 else LARGEST_SHARE_HALF
        after_each = output.float().reshape(rows, 8, size, -1)[
            :, 1::2
        ]  # [rows, 4, tokens, words]: what follows A and A', apart and together
        gaps = [(after_each[:, first] - after_each[:, first + 1]).abs().max() for first in (0, 2)]
        moved = torch.stack([*gaps, torch.zeros_like(gaps[0])])
    moved[2] = float(bool(problem))
    dist.all_reduce(moved, dist.ReduceOp.MAX)
    apart, together, anywhere = moved.tolist()
    return problem or ("another rank can't compute them" if anywhere else leak(apart, together, share))


@contextmanager
def evaluating(engine: Any) -> Iterator[None]:
    """Compute without gradients and dropout."""
    training = engine.training
    engine.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        engine.train(training)


def leak(apart: float, together: float, largest_share: float) -> str:
    """Words for a leak, and for logits on which no token has an effect; '' if documents are kept apart. `apart`: movement of a document's
    logits when the one before it is changed; `together`: the same within one document.
    """
    if not together > 0:  # also NaN
        return "one token shows no effect on the next, so Lockstep can't verify that documents are kept apart"
    if not apart <= largest_share * together:
        return (
            f"changing one document moved the logits of the next one in the same sequence by {apart:.3g} ({together:.3g} without any"
            " separation)"
        )
    return ""
