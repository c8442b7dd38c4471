"""Autograd keeps the parameter of a sharded weight, not what it was gathered into."""

from __future__ import annotations

import weakref

import pytest
import torch

from lockstep_train.model.moe import save_sharded


class StackOfExperts(torch.nn.Module):
    """As transformers computes them: each stack transposed. `gather` and `let_go` do what DeepSpeed does before and after a module."""

    def __init__(self, values: torch.Tensor, *, trained: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(values.clone(), requires_grad=trained)
        self.weight.ds_id, self.weight.ds_numel, self.weight.ds_shape = 0, values.numel(), values.shape

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weight[1:].transpose(-2, -1)

    def gather(self, values: torch.Tensor, offset: int) -> weakref.ref[torch.UntypedStorage]:
        """Into a new buffer, in which it begins at `offset`."""
        buffer = torch.cat([torch.full((offset,), torch.nan), values.flatten()])
        self.weight.data = buffer[offset:].view(values.shape)
        return weakref.ref(buffer.untyped_storage())

    def let_go(self) -> None:
        self.weight.data = torch.empty(0)


VALUES = torch.arange(3.0 * 4 * 5).view(3, 4, 5)


def computed(experts: StackOfExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """A forward pass through gathered weights that are let go afterwards: its input, and its result."""
    rows = torch.ones(3, 2, 5)[1:].requires_grad_()
    buffer = experts.gather(VALUES, offset=0)
    result = experts(rows)
    experts.let_go()
    assert buffer() is None, "something still holds the gathered weight"
    return rows, result


@pytest.mark.parametrize("trained", [False, True])
def test_the_backward_pass_takes_the_weight_from_where_it_is_gathered_then(*, trained: bool) -> None:
    plain = VALUES.clone().requires_grad_()
    expected = torch.ones(3, 2, 5)[1:].requires_grad_()
    (expected @ plain[1:].transpose(-2, -1)).square().sum().backward()
    experts = StackOfExperts(VALUES, trained=trained)
    save_sharded(torch.nn.ModuleDict({"experts": experts}))
    rows, result = computed(experts)
    experts.gather(VALUES, offset=7)
    experts.weight.grad = None
    result.square().sum().backward()
    assert torch.equal(rows.grad, expected.grad)  # type: ignore[arg-type]
    assert experts.weight.grad is None if not trained else torch.equal(experts.weight.grad, plain.grad)  # type: ignore[arg-type]


def test_a_weight_that_nothing_gathers_for_the_backward_pass_is_named() -> None:
    experts = StackOfExperts(VALUES, trained=False)
    save_sharded(torch.nn.ModuleDict({"experts": experts}))
    _, result = computed(experts)
    with pytest.raises(
        RuntimeError, match=r"a weight of shape \(3, 4, 5\) is not gathered in the backward pass; set training.optimization.recompute"
    ):
        result.sum().backward()


def test_a_model_whose_weights_are_whole_stays_as_it_is() -> None:
    whole = torch.nn.ModuleDict({"experts": torch.nn.Linear(2, 2)})
    before = whole["experts"].forward
    save_sharded(whole)
    assert whole["experts"].forward == before
