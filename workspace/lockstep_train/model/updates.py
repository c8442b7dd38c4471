"""What training changed of a tensor of the base model, a block of rows at a time, in FP32.

A tensor of any number of dimensions is taken as rows of its last one, [rows, width].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Base = Callable[[], torch.Tensor]
"""The same rows of the base model, [count, width], in FP32; called only where they are needed."""
Read = Callable[[str], torch.Tensor]
"""A trained parameter by its name, whole, as the live model computes with it, in FP32."""
ReadRange = Callable[[str, int, int], torch.Tensor]
"""Elements [start, start + numel) of one, flattened."""


class Update(Protocol):
    """A tensor's new values."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """The trained parameters that they come from."""
        ...

    def rows(self, first: int, count: int, base: Base) -> torch.Tensor:
        """Rows [first, first + count), as [count, width]."""
        ...


@dataclass(frozen=True)
class Replaced:
    """A tensor that was trained whole, of `width` elements a row."""

    parameter: str
    width: int
    read_range: ReadRange

    @property
    def parameters(self) -> tuple[str, ...]:
        return (self.parameter,)

    def rows(self, first: int, count: int, base: Base) -> torch.Tensor:
        return self.read_range(self.parameter, first * self.width, count * self.width).view(count, self.width)


@dataclass(frozen=True)
class LowRank:
    """W + scale · B · A, of lora_A [rank, in] and lora_B [out, rank]; an embedding's factors have other names and W is transposed."""

    a: str
    b: str
    scale: float
    read: Read
    transposed: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        return (self.a, self.b)

    def rows(self, first: int, count: int, base: Base) -> torch.Tensor:
        a, b = self.read(self.a), self.read(self.b)
        left, right = (a.T, b.T) if self.transposed else (b, a)
        return base() + self.scale * (left[first : first + count] @ right)


@dataclass(frozen=True)
class Decomposed:
    """DoRA: every row of W + scale · B · A, stretched to its magnitude."""

    low_rank: LowRank
    magnitude: str

    @property
    def parameters(self) -> tuple[str, ...]:
        return (*self.low_rank.parameters, self.magnitude)

    def rows(self, first: int, count: int, base: Base) -> torch.Tensor:
        direction = self.low_rank.rows(first, count, base)
        magnitude = self.low_rank.read(self.magnitude).view(-1)[first : first + count]
        stretched: torch.Tensor = direction * (magnitude / torch.linalg.vector_norm(direction, dim=1)).unsqueeze(1)
        return stretched


@dataclass(frozen=True)
class Experts:
    """All experts' weights in one tensor [experts, out, in], or [experts, in, out] (`transposed`).

    The factors are laid out unalike: lora_A [experts · rank, in] has the expert slowest, lora_B [out, rank · experts] fastest.
    """

    a: str
    b: str
    scale: float
    experts: int
    out_features: int
    in_features: int
    transposed: bool
    read: Read

    @property
    def parameters(self) -> tuple[str, ...]:
        return (self.a, self.b)

    def rows(self, first: int, count: int, base: Base) -> torch.Tensor:
        a = self.read(self.a).view(self.experts, -1, self.in_features)
        b = self.read(self.b).view(self.out_features, -1, self.experts)
        values = base()
        height = self.in_features if self.transposed else self.out_features
        done = 0
        while done < count:
            expert, row = divmod(first + done, height)
            taken = min(count - done, height - row)
            left, right = (a[expert].T, b[:, :, expert].T) if self.transposed else (b[:, :, expert], a[expert])
            values[done : done + taken] += self.scale * (left[row : row + taken] @ right)
            done += taken
        return values
