"""Rows of gpu.py, in order of value: models, settings, and lengths of samples. Nothing here needs torch."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from train_inputs import MEDIAN_SHARE, SEED, SHAPES, SHORTEST, SPREAD

PLAIN, DEFAULT, PEFT, LIGER = TRAINERS = ("lockstep-plain", "lockstep", "hugging-face-peft", "hugging-face-peft-liger")
"""Lockstep by rows with everything recomputed; as it is by default; transformers and PEFT; the same with Liger's kernels."""
BY_ROWS = "lockstep-by-rows"
"""Lockstep as it is by default, but by rows: what tokens and packing are compared with."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


class Lengths(Enum):
    """Lengths of a sample's documents."""

    WHOLE = "one document of the row's longest"
    RAGGED = "one document of log-normal length, as in chats"
    PACKED = "documents of such lengths that fill a row"
    QUARTERS = "four documents of a quarter each"


@dataclass(frozen=True)
class Row:
    """Model, settings and samples."""

    config: dict[str, Any]
    sequence: int
    micro: int
    seconds: int
    """Estimate of the whole process on an H200."""
    samples: int = 0
    """Samples of a step; 0: one micro-batch."""
    rank: int = 16
    targets: tuple[str, ...] = ATTENTION
    dropout: str = "0"
    recompute: bool = False
    """Gradient checkpointing of Hugging Face's trainers."""
    lengths: Lengths = Lengths.WHOLE
    unpacked: tuple[str, ...] = ()
    """Trainers that get every document as a sample of its own."""
    trainers: tuple[str, ...] = TRAINERS
    warm: int = 2
    block: int = 2
    """Timed steps of a turn. Between trainers, a turn begins with a step that isn't timed."""
    profiles: bool = False
    """The kernels of a few steps of each trainer are recorded first."""

    @property
    def full(self) -> bool:
        """Micro-batches hold as many tokens as the memory plan counts."""
        return self.lengths is not Lengths.RAGGED

    def sizes(self, trainer: str) -> tuple[int, int]:
        """Longest sample and micro-batch of a trainer."""
        return (self.sequence // 4, 4 * self.micro) if trainer in self.unpacked else (self.sequence, self.micro)

    def packs(self, trainer: str) -> bool:
        return self.lengths in (Lengths.PACKED, Lengths.QUARTERS) and trainer not in self.unpacked

    def documents(self, step: int) -> list[tuple[int, ...]]:
        """Lengths of the documents of each of a step's samples: of the step alone."""
        draw = random.Random(f"{SEED}:{step}")  # noqa: S311 (sample lengths)
        return [self._sample(draw) for _ in range(self.samples or self.micro)]

    def _sample(self, draw: random.Random) -> tuple[int, ...]:
        if self.lengths is Lengths.WHOLE:
            return (self.sequence,)
        if self.lengths is Lengths.QUARTERS:
            return (self.sequence // 4,) * 4
        if self.lengths is Lengths.RAGGED:
            return (self._document(draw, self.sequence),)
        lengths: list[int] = []
        while (room := self.sequence - sum(lengths)) > 0:
            lengths.append(room if room <= 2 * SHORTEST else self._document(draw, room))
        return tuple(lengths)

    def _document(self, draw: random.Random, most: int) -> int:
        return min(most, SHORTEST + int(draw.lognormvariate(math.log(MEDIAN_SHARE * self.sequence), SPREAD)))


_8B, _GLM = SHAPES["8b"].config, SHAPES["glm-air-slice"].config
_QWEN3_8B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1000000.0, "max_position_embeddings": 40960,
}  # fmt: skip
_QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    "rope_theta": 1000000.0, "max_position_embeddings": 40960,
}  # fmt: skip
ROWS = {
    "8b-lora-4k": Row(_8B, 4096, 2, 100, profiles=True),
    "8b-all-linear-4k": Row(_8B, 4096, 2, 80, targets=LINEAR, dropout="0.1"),
    "qwen3-8b-packed-2k": Row(_QWEN3_8B, 2048, 2, 80, samples=8, targets=LINEAR, lengths=Lengths.PACKED, warm=1, block=1),
    "8b-ragged": Row(_8B, 4096, 8, 90, recompute=True, lengths=Lengths.RAGGED, trainers=(BY_ROWS, DEFAULT, PEFT), warm=1, block=3),
    "glm-air-4-layers-16k": Row(_GLM, 16384, 1, 70, recompute=True, warm=1),
    "qwen3-30b-a3b": Row(_QWEN3_30B_A3B, 4096, 2, 105, recompute=True, warm=1),
    "8b-packed": Row(_8B, 4096, 2, 70, lengths=Lengths.QUARTERS, unpacked=(BY_ROWS, PEFT, LIGER), trainers=(BY_ROWS, DEFAULT, PEFT, LIGER)),
    "checkpoint": Row(_8B, 4096, 2, 75, rank=64, targets=LINEAR, trainers=(DEFAULT,)),
    "8b-longest": Row({**_8B, "max_position_embeddings": 1 << 20}, 65536, 1, 80, trainers=(DEFAULT,), warm=1, block=1),
}
"""The profiles come first, then AutoModel's settings for 8B, and those of Surogate's table for Qwen3-8B. GLM-4.5-Air has 4 of its 46
layers.
"""

_TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def tiny(row: Row) -> Row:
    """Return the same row for where there is no GPU: the same code in seconds."""
    config = {key: _TINY.get(key, value) for key, value in row.config.items()}
    return replace(row, config=config, sequence=64, rank=8, seconds=0, warm=1, block=1)
