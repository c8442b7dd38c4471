"""Where the elements of a fused tensor lie in the stored ones."""

from __future__ import annotations

import pytest

from lockstep_train.model.layouts import StoredPiece, TensorLayout, concatenate, stack, stored_layout


def elements(layout: TensorLayout, start: int, numel: int) -> list[str]:
    return [f"{piece.name}{element}" for piece in layout.cut(start, numel) for element in range(piece.start, piece.start + piece.numel)]


def test_stacked_tensors_follow_one_another() -> None:
    layout = stack([stored_layout("a", (2,)), stored_layout("b", (2,))])
    assert layout.shape == (2, 2)
    assert elements(layout, 0, 4) == ["a0", "a1", "b0", "b1"]


def test_concatenation_along_an_inner_dimension_interleaves_the_blocks() -> None:
    gate = stack([stored_layout("g", (1, 2)), stored_layout("h", (1, 2))])
    up = stack([stored_layout("u", (2, 2)), stored_layout("v", (2, 2))])
    layout = concatenate([gate, up], 1)
    assert layout.shape == (2, 3, 2)
    assert elements(layout, 0, 12) == ["g0", "g1", "u0", "u1", "u2", "u3", "h0", "h1", "v0", "v1", "v2", "v3"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7, 24])
def test_ranges_of_any_length_cover_each_element_once(ranks: int) -> None:
    layout = concatenate(
        [stack([stored_layout("g", (3, 2)), stored_layout("h", (3, 2))]), stack([stored_layout("u", (3, 2)), stored_layout("v", (3, 2))])],
        1,
    )
    part = -(-24 // ranks)
    cut = [element for rank in range(ranks) for element in elements(layout, min(24, part * rank), max(0, min(part, 24 - part * rank)))]
    assert cut == elements(layout, 0, 24)
    assert len(set(cut)) == 24


def test_nothing_is_cut_past_the_end() -> None:
    assert stored_layout("a", (3,)).cut(3, 0) == []
    assert stored_layout("a", (0,)).cut(0, 0) == []
    assert stored_layout("a", (5,)).cut(1, 3) == [StoredPiece("a", 1, 3)]


def test_tensors_of_unequal_shapes_cannot_be_joined() -> None:
    with pytest.raises(ValueError, match="can't be stacked"):
        stack([stored_layout("a", (2,)), stored_layout("b", (3,))])
    with pytest.raises(ValueError, match="can't be joined along dimension 1"):
        concatenate([stored_layout("a", (2, 2)), stored_layout("b", (3, 2))], 1)
