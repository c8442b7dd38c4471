"""Attention to the documents of a row, each of which it computes by itself: no token sees another document, and no mask of a whole row is
needed.

| kernel | where | cost |
|---|---|---|
| torch's varlen attention (cuDNN's or flash) | CUDA of Ampere or newer, BF16 or FP16; scores without caps and sinks | one call, which grows
with each document's own length |
| compiled flex attention | CUDA; scores with caps or sinks | the same |
| the model's own, called for each document | elsewhere | a call for each document, and a copy of the outputs |

A kernel is used where it gave what the model's own attention gives, forwards and backwards, in the test at the start (isolation.py).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch

from lockstep_spec.choices import Precision
from lockstep_train.base.errors import first_line, may_pass
from lockstep_train.data.sequences.batches import bounds_of

AMPERE, HOPPER = (8, 0), (9, 0)
"""Compute capabilities of the oldest GPUs for varlen attention, and for cuDNN's attention before torch's other kernels."""
HALF = {Precision.BF16, Precision.FP16}
KNOWN_TENSORS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "position_ids", "s_aux"})
"""Tensors among attention's options that say nothing of single pairs of tokens: bounds, and gpt-oss's sinks. Others may, as an index of the
keys to attend to.
"""
LARGEST_DIFFERENCE = 3e-2
"""Between a kernel's results and the model's own, as a share of the largest: a few of BF16's steps of 8e-3."""

TRIAL_LENGTHS, TRIAL_WINDOW = (100, 200), 64
"""Documents with which a kernel is tried: longer than 128 tokens, up to which torch may choose another, and than the window."""

States = Sequence[torch.Tensor]
"""Queries, keys and values: [batch, heads, sequence, head]."""
Kernel = Callable[[torch.nn.Module, States, tuple[int, ...], int | None, dict[str, Any]], torch.Tensor]
"""(module, states, lengths of documents over all rows, window, attention's other options) → [batch, sequence, heads, head]."""


class ByDocument:
    """A model's own attention, run for each document by itself, or a kernel that does the same in one call. A padded row is one
    document.
    """

    def __init__(self, original: str, kernels: Sequence[str] = ()) -> None:
        """`original`: transformers' name of the attention that computes a document. `kernels`: those of KERNELS that this device may
        have.
        """
        from transformers import AttentionInterface, AttentionMaskInterface

        self.original = original
        self.name = f"lockstep_{original}"
        self.mismatch = ""
        """Reason why a row can't be computed so; '' if none was met."""
        self.windows: tuple[set[int], set[int]] = set(), set()
        """Windows that the model's masks are asked to have, and those that its layers tell the attention."""
        self.refused: dict[str, str] = {}
        """Kernel → reason why it isn't used."""
        self._kernels = kernels
        self._tried: dict[tuple[str, int, int, int | None], bool] = {}
        """Kernel, sizes of heads and window → is it what the model's own attention gives?"""
        AttentionInterface.register(self.name, self.attend)
        AttentionMaskInterface.register(self.name, self.mask)

    def mask(self, *, use_vmap: bool = False, local_size: int | None = None, **options: Any) -> torch.Tensor | None:
        """No mask of whole rows, unless the model has a pattern of its own (`use_vmap`), padding or sight in both directions."""
        if use_vmap or options.get("attention_mask") is not None or options.get("allow_is_bidirectional_skip"):
            return self._masks()(use_vmap=use_vmap, local_size=local_size, **options)  # type: ignore[no-any-return]
        if local_size:
            self.windows[0].add(local_size)
        return None

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        document_lengths: tuple[int, ...] | None = None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of [batch, heads, sequence, head] tensors; the result is [batch, sequence, heads, head]."""
        states, (rows, _, width, _) = (query, key, value), query.shape
        unknown = [name for name, each in options.items() if isinstance(each, torch.Tensor) and name not in KNOWN_TENSORS]
        joined = document_lengths is not None and len(document_lengths) > rows
        if joined and (attention_mask is not None or unknown):
            self.mismatch = f"its attention has {f'an option {unknown[0]}' if unknown else 'a mask'} for single pairs of tokens"
            assert not module.training, self.mismatch  # noqa: S101 (the test at the start has seen this model's rows)
        if sliding_window is not None:
            self.windows[1].add(sliding_window)
        if self.mismatch or attention_mask is not None or not (joined or (self.original == "eager" and self._kernels)):
            mask = self._document_mask(query, sliding_window) if attention_mask is None else attention_mask
            return self._own(module)(module, *states, mask, sliding_window=sliding_window, **options)  # type: ignore[no-any-return]
        lengths = document_lengths if joined and document_lengths else (width,) * rows
        kernel = self._kernel(module, states, lengths, sliding_window, options)
        return kernel(module, states, lengths, sliding_window, options), None

    def words(self) -> str:
        """Return what computes the documents."""
        used = dict.fromkeys(name for (name, *_), equal in self._tried.items() if equal and name not in self.refused)
        return " and ".join(used) or "attention to each by itself"

    def problem(self) -> str:
        """Return the reason why the joined rows so far weren't computed as the model computes rows; '' if they were."""
        if self.mismatch:
            return self.mismatch
        asked, told = self.windows
        return "its layers limit attention in a way that only a mask of whole rows shows" if asked != told else ""

    def _kernel(
        self, module: torch.nn.Module, states: States, lengths: tuple[int, ...], window: int | None, options: dict[str, Any]
    ) -> Kernel:
        """Return what computes these states. A kernel is tried in a pass without gradients alone: under a layer's recomputation, the trial
        would count.
        """
        name = FLEX if options.get("softcap") is not None or options.get("s_aux") is not None else VARLEN
        if name not in self._kernels or name in self.refused or options.get("dropout"):
            return self._each
        tried = name, states[0].shape[-1], states[2].shape[-1], window
        if tried not in self._tried and not torch.is_grad_enabled():
            problem = self._difference(KERNELS[name], module, states, window, options)
            self._tried[tried] = not problem
            if problem:
                self.refused[name] = problem
        return KERNELS[name] if self._tried.get(tried) else self._each

    def _difference(self, kernel: Kernel, module: torch.nn.Module, states: States, window: int | None, options: dict[str, Any]) -> str:
        """Return words for a kernel that fails, or gives other outputs or gradients than the model's own attention; '' for one that is
        right.

        A token more or less in the window would show.
        """
        draw, window = torch.Generator(states[0].device).manual_seed(1), window and min(window, TRIAL_WINDOW)
        sizes = [(1, each.shape[1], sum(TRIAL_LENGTHS), each.shape[3]) for each in states]
        drawn = [torch.randn(size, generator=draw, device=draw.device).to(each.dtype) for size, each in zip(sizes, states, strict=True)]
        results = []
        for way in (self._each, kernel):
            inputs = [each.clone().requires_grad_() for each in drawn]
            try:
                with torch.enable_grad():
                    output = way(module, inputs, TRIAL_LENGTHS, window, options)
                    results.append([output, *torch.autograd.grad(output.float().square().sum(), inputs)])
            except Exception as error:
                if way == self._each or may_pass(error):
                    raise
                return first_line(error)
        away = torch.stack([(one - other).abs().max().float() / one.abs().max() for one, other in zip(*results, strict=True)]).max()
        return "" if float(away) <= LARGEST_DIFFERENCE else f"its results differ by {away:.2g} of the largest"

    def _each(
        self, module: torch.nn.Module, states: States, lengths: tuple[int, ...], window: int | None, options: dict[str, Any]
    ) -> torch.Tensor:
        """Call the model's own attention for each document."""
        rows, _, width, _ = states[0].shape
        own = partial(self._own(module), module, sliding_window=window, **options)
        parts = (torch.split(_one_row(each), list(lengths), dim=2) for each in states)
        outputs = [own(*document, self._document_mask(document[0], window))[0] for document in zip(*parts, strict=True)]
        return torch.cat(outputs, dim=1).reshape(rows, width, *outputs[0].shape[2:])

    def _own(self, module: torch.nn.Module) -> Any:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        return ALL_ATTENTION_FUNCTIONS.get_interface(self.original, eager)

    def _masks(self) -> Any:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        return ALL_MASK_ATTENTION_FUNCTIONS[self.original]

    def _document_mask(self, query: torch.Tensor, window: int | None) -> torch.Tensor | None:
        """Mask of one document; None where causal attention without one is the same."""
        from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

        length = query.shape[2]
        windowed = window is not None and length > window
        function = sliding_window_causal_mask_function(window) if windowed else causal_mask_function
        local = {"local_size": window} if windowed else {}
        mask: torch.Tensor | None = self._masks()(
            batch_size=1, q_length=length, kv_length=length, mask_function=function, dtype=query.dtype, device=query.device, **local
        )
        return mask


def _one_row(states: torch.Tensor) -> torch.Tensor:
    """[batch, heads, sequence, head] as one row."""
    return states.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def _varlen(module: torch.nn.Module, states: States, lengths: tuple[int, ...], window: int | None, options: dict[str, Any]) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    rows, heads, width, size = states[0].shape
    query, key, value = (each.transpose(1, 2).flatten(0, 1) for each in states)
    wide = torch.nn.functional.pad(value, (0, size - value.shape[-1])) if value.shape[-1] < size else value
    bounds, longest = bounds_of(lengths, query.device), max(lengths)
    groups = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.11 groups unasked
    grouped: dict[str, Any] = {"enable_gqa": heads != key.shape[1]} if groups else {}
    output: Any = varlen_attn(
        query, key, wide, bounds, bounds, longest, longest,
        scale=options.get("scaling"), window_size=(window - 1 if window else -1, 0), **grouped,
    )  # fmt: skip
    joined: torch.Tensor = output[..., : value.shape[-1]].reshape(rows, width, heads, -1)
    return joined


def _flex(module: torch.nn.Module, states: States, lengths: tuple[int, ...], window: int | None, options: dict[str, Any]) -> torch.Tensor:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    mask = block_mask(lengths, states[0].shape[0], window, states[0].device)
    output: torch.Tensor = ALL_ATTENTION_FUNCTIONS["flex_attention"](module, *states, mask, **options)[0]
    return output


@lru_cache(maxsize=4)
def block_mask(lengths: tuple[int, ...], rows: int, window: int | None, device: torch.device) -> Any:
    """Make flex attention's mask of documents: a token sees those before it in its own, at most `window` with itself."""
    from torch.nn.attention.flex_attention import create_block_mask

    documents = torch.repeat_interleave(torch.tensor(lengths, device=device)).reshape(rows, -1)

    def sees(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = (documents[row, query] == documents[row, key]) & (query >= key)
        return seen & (query - key < window) if window else seen

    width = documents.shape[1]
    make = torch.compile(create_block_mask) if device.type == "cuda" else create_block_mask
    return make(sees, rows, None, width, width, device=device)


VARLEN, FLEX = "torch's varlen attention", "compiled flex attention"
KERNELS: Mapping[str, Kernel] = {VARLEN: _varlen, FLEX: _flex}

_BY_DOCUMENT: dict[str, ByDocument] = {}
"""Name for transformers, whose registry is one of the process, too → attention."""


def by_document(model: Any) -> ByDocument | None:
    """Return the document-by-document attention of a model that has been set to it; None for another."""
    return _BY_DOCUMENT.get(attention_of(model))


def attention_of(model: Any) -> str:
    return str(model.config.get_text_config()._attn_implementation)


def choose_attention(model: Any, precision: Precision, device: torch.device) -> None:
    """Set attention that keeps the documents of a row apart without a mask of whole rows."""
    chosen = ByDocument(attention_of(model), kernels_of(precision, device))
    _BY_DOCUMENT[chosen.name] = chosen
    model.set_attn_implementation(chosen.name)


def kernels_of(precision: Precision, device: torch.device) -> list[str]:
    if device.type != "cuda":
        return []
    varlen = precision in HALF and torch.cuda.get_device_capability(device) >= AMPERE
    return [VARLEN, FLEX] if varlen else [FLEX]


def cudnn_first(device: torch.device) -> AbstractContextManager[None]:
    """Let torch take cuDNN's attention before its other kernels where that is the fastest: on Hopper and newer. Backward passes belong
    under it, too: they compute again.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < HOPPER:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)
