"""However large a model, a tensor or a file is, a rank holds no more of it at once than is promised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lockstep_train import export
from lockstep_train.base.errors import ConfigError
from lockstep_train.checkpoint.save import snapshot
from lockstep_train.demo import __main__ as demo
from lockstep_train.model import merger, moe, weight_files
from lockstep_train.zero.secondary import fingerprint


def sizes_of(method: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements of each tensor whose method is called from here on."""
    real, sizes = getattr(torch.Tensor, method), list[int]()
    monkeypatch.setattr(torch.Tensor, method, lambda self, *others: sizes.append(self.numel()) or real(self, *others))
    return sizes


def test_a_snapshot_is_copied_a_million_elements_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = torch.ones(5 << 19, dtype=torch.uint8), torch.zeros(5 << 19, dtype=torch.uint8)
    sizes = sizes_of("copy_", monkeypatch)
    snapshot._copy(source, target)
    assert (sizes, bool(target.all())) == ([1 << 20, 1 << 20, 1 << 19], True)


def test_four_million_elements_are_widened_for_a_fingerprint_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = sizes_of("long", monkeypatch)
    fingerprint(torch.ones((4 << 20) + 9, dtype=torch.uint8), 0)
    assert sizes == [4 << 20, 9]


def test_16_mebibytes_of_a_weight_of_another_dtype_are_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(weight_files.os, "preadv", lambda _, views, __: sizes.append(len(views[0])) or len(views[0]))
    (tmp_path / "x").touch()
    stored = weight_files.StoredTensor(tmp_path / "x", "F32", (5 << 20,), 0)
    with weight_files.WeightReader({"w": stored}) as reader:
        assert reader.read("w", 0, torch.empty(5 << 20, dtype=torch.bfloat16)) == 20 << 20
    assert sizes == [16 << 20, 4 << 20]


class Large:
    """A tensor of two billion bytes, as far as a file of weights knows it."""

    def numel(self) -> int:
        return 10**9

    def element_size(self) -> int:
        return 2

    def cpu(self) -> Large:
        return self

    def clone(self, **_: Any) -> Large:
        return self


def test_a_file_of_a_trained_model_has_five_billion_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetensors.torch.save_file", lambda *_, **__: None)
    files = export.WeightFiles(tmp_path)
    for name in "abcde":
        files.add(name, cast(Any, Large()))
    files.finish()
    assert [names for _, names in files._files] == [["a", "b"], ["c", "d"], ["e"]]


def test_a_merge_keeps_the_last_eight_factors_that_it_read() -> None:
    reads: list[str] = []
    shards = SimpleNamespace(read=lambda name, _: reads.append(name) or torch.zeros(4), shapes=dict.fromkeys("abcdefghi", (2, 2)))
    read, _ = merger._readers(cast(Any, shards), torch.bfloat16)
    for name in "abcdefgh" + "a" + "i" + "b":
        assert read(name).shape == (2, 2)
    assert reads == [*"abcdefghib"]


@pytest.mark.parametrize(("width", "problem"), [(8, None), (4, "rows of 8 bytes, but grouped_mm needs a multiple of 16"), (12, "24 bytes")])
def test_experts_have_rows_of_whole_blocks_of_16_bytes(width: int, problem: str | None) -> None:
    experts = torch.nn.Module()
    experts.weight = torch.nn.Parameter(torch.empty(2, 3, width, dtype=torch.bfloat16))
    with refused(problem):
        moe.check_rows("layer", experts)


@contextmanager
def refused(problem: str | None) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        assert problem is not None and problem in str(error), error
    else:
        assert problem is None


def test_the_demo_learns_from_texts_of_80_characters_and_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["a" * 79, "b" * 79 + ".", "c" * 99 + "."]
    (tmp_path / "x.py").write_text("".join(f'def f{number}():\n    """{text}"""\n' for number, text in enumerate(texts)))
    monkeypatch.setattr(demo.sysconfig, "get_paths", lambda: {"stdlib": tmp_path})
    assert demo.standard_library_docstrings() == texts[1:]
