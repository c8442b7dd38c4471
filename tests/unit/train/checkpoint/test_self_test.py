"""What the test at the start takes of the memory, with an engine that only has tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep_train.zero import self_test, zero_access
from lockstep_train.zero.kinds import FULL, LITE, MASTER, WEIGHTS
from lockstep_train.zero.self_test import _pattern
from lockstep_train.zero.zero_access import Fragment, UnknownDeepSpeed

ELEMENTS = 50_000
BLOCK = 1000


class Engine:
    """Three parameters that this rank owns whole."""

    def __init__(self) -> None:
        self.optimizer = SimpleNamespace()
        self.parameters = {name: torch.nn.Parameter(torch.zeros(ELEMENTS)) for name in "abc"}
        self.state = {name: {kind: torch.zeros(ELEMENTS) for kind in FULL} for name in "abc"}
        for name in self.state:
            self.state[name][MASTER].copy_(torch.randn(ELEMENTS))
        self.full = [Fragment(name, (ELEMENTS,), 0, ELEMENTS, tensors) for name, tensors in self.state.items()]
        self.lite = [Fragment(name, (ELEMENTS,), 0, ELEMENTS, {WEIGHTS: item[MASTER].bfloat16()}) for name, item in self.state.items()]


def tensor_bytes() -> int:
    """Size of all storages that anybody holds, but for those of frozen objects."""
    gc.collect()
    found = [item.untyped_storage() for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    gc.collect()
    gc.freeze()  # what earlier tests left is walked through no more
    engine = Engine()
    monkeypatch.setattr(zero_access, "fragments", lambda engine, kinds=None: engine.lite if kinds == LITE else engine.full)
    monkeypatch.setattr(zero_access, "trainable", lambda engine: list(engine.parameters.items()))
    monkeypatch.setattr(self_test, "BLOCK_ELEMENTS", BLOCK)
    yield engine
    gc.unfreeze()


def test_a_parameter_costs_its_own_part_once_and_blocks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[str, int]] = []
    made: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            for item in result if isinstance(result, (list, tuple)) else [result]:
                storage = getattr(item, "untyped_storage", lambda: None)()
                if storage is not None and storage.data_ptr() not in known:
                    made.append(storage.nbytes())
            return result

    def public(parameter: Any, kind: str) -> Any:
        name = next(name for name, value in engine.parameters.items() if value is parameter)
        held.append((kind, tensor_bytes() - before))
        return engine.state[name][kind]

    known = {tensor.untyped_storage().data_ptr() for item in [*engine.full, *engine.lite] for tensor in item.tensors.values()}
    monkeypatch.setattr(self_test, "_public", public)
    before = tensor_bytes()
    with Sizes():
        self_test.self_test(engine)
    own = 4 * ELEMENTS
    assert [(kind, size <= (own if kind == MASTER else 0) + 12 * BLOCK) for kind, size in held] == [
        (kind, True) for kind in FULL for _ in "abc"
    ]
    assert sorted(size for size in made if size > 4 * BLOCK) == [own] * 3, "more than the three copies of masters is as large as a tensor"


def test_values_are_as_before_whatever_they_were(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.state["b"]["exp_avg"].fill_(2.5)
    expected = {name: {kind: value.clone() for kind, value in item.items()} for name, item in engine.state.items()}

    def public(parameter: Any, kind: str) -> Any:
        name = next(name for name, value in engine.parameters.items() if value is parameter)
        return engine.state[name][kind].clone() + (1 if wrong == (name, kind) else 0)

    monkeypatch.setattr(self_test, "_public", public)
    for wrong in [None, ("b", "exp_avg")]:
        if wrong is None:
            self_test.self_test(engine)
        else:
            with pytest.raises(UnknownDeepSpeed, match="exp_avg of b is not where"):
                self_test.self_test(engine)
        assert all(torch.equal(engine.state[name][kind], value) for name, item in expected.items() for kind, value in item.items())


def test_the_pattern_goes_on_where_32_bits_end() -> None:
    start = 2**33 - 5
    assert torch.equal(_pattern(start, 10, torch.device("cpu")).long(), torch.arange(start, start + 10) % 65_521)
