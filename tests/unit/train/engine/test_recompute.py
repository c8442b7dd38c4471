"""What a layer keeps while it computes, and what the second pass takes of it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig

from lockstep_spec.choices import Recompute
from lockstep_spec.settings import Level, Recomputed
from lockstep_train.base.errors import ConfigError
from lockstep_train.engine.recompute import is_kept, recompute_layers
from lockstep_train.memory.capacity import is_crowded

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")  # its new name is not in every version
TENSOR = torch.zeros(2, 8)
ATEN = torch.ops.aten


def model() -> torch.nn.Module:
    config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2)
    made: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return made.train()


@pytest.mark.parametrize(
    ("function", "arguments", "width", "kept"),
    [
        (ATEN.mm.default, (TENSOR, TENSOR.t()), 8, True),
        (ATEN.mm.default, (TENSOR, TENSOR.t()), 9, False),
        (ATEN.mm.default, (TENSOR, TENSOR.t()), None, False),
        (ATEN.addmm.default, (TENSOR[0], TENSOR, TENSOR.t()), 8, True),
        (ATEN.mul.Tensor, (TENSOR, TENSOR), 8, False),
        (ATEN._scaled_dot_product_flash_attention.default, (TENSOR, TENSOR, TENSOR), None, True),
        (ATEN._scaled_dot_product_flash_attention.default, (TENSOR, TENSOR, TENSOR, 0.0, True), None, True),
        (ATEN._scaled_dot_product_flash_attention.default, (TENSOR, TENSOR, TENSOR, 0.1, True), None, False),
        (ATEN._scaled_dot_product_cudnn_attention.default, (TENSOR, TENSOR, TENSOR, None, True, 0.1), None, False),
        (ATEN._scaled_dot_product_efficient_attention.default, (TENSOR, TENSOR, TENSOR, None, True), None, True),
    ],
)
def test_products_of_long_rows_are_kept_and_attention_that_draws_no_random_numbers(
    function: object, arguments: tuple[object, ...], width: int | None, kept: bool
) -> None:
    assert is_kept(function, arguments, width) is kept


def test_what_is_written_to_after_it_was_kept_gives_the_same_gradients() -> None:
    """DeepSpeed's linear layer adds its bias in place."""
    base = model()
    recompute_layers(base, Recomputed(Level.NORMS), Recompute.AUTO, print)
    again = base.model.layers[0]._gradient_checkpointing_func
    weight, bias = torch.randn(16, 16), torch.randn(16)

    def layer(inputs: torch.Tensor) -> torch.Tensor:
        outputs = inputs @ weight
        outputs += bias
        return torch.nn.functional.silu(outputs) * outputs

    gradients = []
    for call in (layer, functools.partial(checkpoint, layer, use_reentrant=False), functools.partial(again, layer)):
        inputs = torch.linspace(-1, 1, 32).view(2, 16).requires_grad_()
        gradients += torch.autograd.grad(call(inputs).sum(), inputs)
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


def test_the_layers_that_keep_everything_are_returned_and_the_first_ones_compute_again() -> None:
    base = model()
    assert recompute_layers(base, Recomputed(Level.NONE), Recompute.AUTO, print) == [base]
    layers = list(base.model.layers)
    assert recompute_layers(base, Recomputed(Level.NORMS, 2), Recompute.AUTO, print) == layers[2:]
    assert [layer.gradient_checkpointing for layer in layers] == [True, True, False]
    assert recompute_layers(base, Recomputed(Level.ALL, 1), Recompute.AUTO, print) == []


def test_a_model_that_can_not_compute_again_is_refused_where_all_is_asked_for_and_keeps_everything_else() -> None:
    base = model()
    base.supports_gradient_checkpointing = False
    lines: list[str] = []
    assert recompute_layers(base, Recomputed(Level.ALL), Recompute.AUTO, lines.append) == [base]
    assert lines == ["LlamaForCausalLM can't compute its layers again in the backward pass, so they keep their activations"]
    with pytest.raises(ConfigError, match=r"training\.optimization\.recompute is All, but LlamaForCausalLM can't .*; set it to None"):
        recompute_layers(base, Recomputed(Level.ALL), Recompute.ALL, lines.append)


@pytest.mark.parametrize(("free", "crowded"), [(79, False), (77, True)])
def test_a_gpu_is_crowded_where_more_is_taken_than_this_process_takes(monkeypatch: pytest.MonkeyPatch, free: int, crowded: bool) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    assert is_crowded(torch.device("cuda")) is crowded
    assert not is_crowded(torch.device("cpu"))
