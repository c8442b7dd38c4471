"""The choices among a training's settings: what the API offers, the arithmetic reads and the trainer does are the same."""

from __future__ import annotations

from enum import StrEnum


class ZeroStage(StrEnum):
    """What DeepSpeed cuts into shards: optimizer state; also gradients; also weights. Stage1 stands for plain data parallel."""

    STAGE1 = "Stage1"
    STAGE2 = "Stage2"
    STAGE3 = "Stage3"

    @property
    def number(self) -> int:
        """As DeepSpeed counts them."""
        return int(self.value[-1])


class Precision(StrEnum):
    """The number format of weights and activations. Optimizer state is FP32 always."""

    BF16 = "BF16"
    FP16 = "FP16"
    FP32 = "FP32"


class Method(StrEnum):
    """What is trained: a low-rank adapter beside the frozen base model, or every weight of it."""

    LORA = "LoRA"
    FULL = "Full"


class Quantization(StrEnum):
    """The number format of the frozen base weights: as they are, 4-bit NormalFloat, or 8-bit integers."""

    NONE = "None"
    NF4 = "NF4"
    INT8 = "Int8"


class Offload(StrEnum):
    """Where the optimizer's state lives and its step is computed."""

    NONE = "None"
    CPU = "CPU"


class HierarchicalPartition(StrEnum):
    """Whether each node keeps a whole copy of the frozen weights (ZeRO++ hpZ), so that Stage3 gathers them within the node."""

    AUTO = "Auto"
    NODE = "Node"
    NONE = "None"


class Optimizer(StrEnum):
    """AdamW decays weights apart from the gradient; Adam adds the decay to it."""

    ADAMW = "AdamW"
    ADAM = "Adam"


class Schedule(StrEnum):
    """How the learning rate falls after the warm-up."""

    COSINE = "Cosine"
    LINEAR = "Linear"
    CONSTANT = "Constant"


class NonFinitePolicy(StrEnum):
    """What happens when a loss or a gradient is not finite: the run ends, or that step is left out and counted."""

    STOP = "Stop"
    SKIP = "Skip"


class DataFormat(StrEnum):
    """How samples stand in a file: by its name, JSON lines, or plain text."""

    AUTO = "Auto"
    JSONL = "JSONL"
    TEXT = "Text"


class Overlong(StrEnum):
    """What happens to a sample of more than maxLength tokens."""

    TRUNCATE = "Truncate"
    DROP = "Drop"
    SPLIT = "Split"
    ERROR = "Error"


class TrainOn(StrEnum):
    """Which tokens are learned: the assistant's (or the completion), its last turn only, or all."""

    ASSISTANT = "Assistant"
    LAST_TURN = "LastTurn"
    ALL = "All"


class OnBroken(StrEnum):
    """What happens to lines of the data that can't be used: the run is refused, or they are left out and counted."""

    FAIL = "Fail"
    DROP = "Drop"


TEMPLATE_OWN = frozenset(
    {
        "messages",
        "conversations",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "return_assistant_tokens_mask",
        "strftime_now",
    }
)
"""Variables of a chat template that are set by whoever renders it, and by no setting or row."""


class Content(StrEnum):
    """What a checkpoint holds: FP32 masters and optimizer state, for an exact resume; or the trained weights alone."""

    FULL = "Full"
    LITE = "Lite"
