"""What an overflow in FP16 means: the scaler's search for its height where it has one, else a step that is not finite."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lockstep_spec.choices import NonFinitePolicy
from lockstep_train.base.errors import NonFinite
from lockstep_train.engine.step import Stepper


def stepper(policy: NonFinitePolicy, *, dynamic: bool) -> Any:
    optimizer = SimpleNamespace(loss_scaler=SimpleNamespace(dynamic=dynamic), loss_scale=128.0)
    engine = SimpleNamespace(optimizer=optimizer, fp16_enabled=lambda: True)
    anything = cast(Any, SimpleNamespace(device=torch.device("cpu")))
    return Stepper(engine, anything, anything, anything, anything, seed=1, policy=policy)


def leave_out(found: Any, steps: int) -> None:
    for step in range(1, steps + 1):
        found._count(step, found._left_out(step))


def test_a_scaler_that_seeks_its_height_may_leave_out_as_many_steps_as_it_needs() -> None:
    found = stepper(NonFinitePolicy.STOP, dynamic=True)
    leave_out(found, 50)
    assert found._left_out(51) == "the gradients of step 51 overflow FP16; the loss scale is lowered to 128"


def test_a_fixed_scale_stops_at_the_first_overflow() -> None:
    with pytest.raises(NonFinite, match=r"gradients of step 1 are not finite in FP16 at the loss scale 128, which training\.deepspeed"):
        leave_out(stepper(NonFinitePolicy.STOP, dynamic=False), 1)


def test_a_fixed_scale_may_leave_out_no_more_steps_in_a_row_than_another_precision() -> None:
    found = stepper(NonFinitePolicy.SKIP, dynamic=False)
    leave_out(found, 19)
    with pytest.raises(NonFinite, match="20 steps in a row were left out"):
        leave_out(found, 1)
