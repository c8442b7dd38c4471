"""Choices among a job's settings: what the API offers, agents and arithmetic read, and the trainer does are the same. Its time limits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self


class Choice(str, Enum):  # noqa: UP042 (StrEnum is Python 3.11; agents run on 3.10)
    """An enumeration whose members are text, and are printed as it. A value that only another version knows is no member, and is kept."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the member of this value; for a value of another version an instance that is no member, with the same text."""
        member = cls._value2member_map_.get(text)
        if isinstance(member, cls):
            return member
        other = str.__new__(cls, text)
        other._name_ = other._value_ = text
        return other

    @property
    def is_known(self) -> bool:
        """False for a value that this version has no member for: nothing may end, or be removed, because of it."""
        return self.value in type(self)._value2member_map_


class StorageMode(Choice):
    """`Shared`: one ReadWriteMany pair of claims a namespace. `PerPod`: every pod has volumes of its own."""

    SHARED = "Shared"
    PER_POD = "PerPod"


class DegradedPolicy(Choice):
    """Reaction to a fabric that, by NCCL's log, is not the one the job asked for: `Fail` ends the job, `Warn` says so."""

    FAIL = "Fail"
    WARN = "Warn"


class Severity(Choice):
    """An Error stops the start, a Warning doesn't."""

    ERROR = "Error"
    WARNING = "Warning"


class ZeroStage(Choice):
    """Parts of the state that DeepSpeed cuts into shards: optimizer state; also gradients; also weights. Stage1 stands for plain data
    parallel.
    """

    STAGE1 = "Stage1"
    STAGE2 = "Stage2"
    STAGE3 = "Stage3"

    @property
    def number(self) -> int:
        """Number by which DeepSpeed knows the stage."""
        return int(self.value[-1])


class Precision(Choice):
    """The number format of weights and activations. Optimizer state is FP32 always."""

    BF16 = "BF16"
    FP16 = "FP16"
    FP32 = "FP32"


class Method(Choice):
    """Weights that are trained: a low-rank adapter beside the frozen base model, or every weight of it."""

    LORA = "LoRA"
    FULL = "Full"


class Quantization(Choice):
    """The number format of the frozen base weights: as they are, or 4-bit NormalFloat."""

    NONE = "None"
    NF4 = "NF4"


class Offload(Choice):
    """Device on which the optimizer's state lives and its step is computed: the rank's own, or the CPU."""

    NONE = "None"
    CPU = "CPU"


class Recompute(Choice):
    """Activations that the backward pass computes again instead of keeping them: as few as memory needs, none, or all but each layer's
    input.
    """

    AUTO = "Auto"
    NONE = "None"
    ALL = "All"


class HierarchicalPartition(Choice):
    """A whole copy of the frozen weights on each node (ZeRO++ hpZ), so that Stage3 gathers them within the node."""

    AUTO = "Auto"
    NODE = "Node"
    NONE = "None"


class Schedule(Choice):
    """Curve by which the learning rate falls after the warm-up."""

    COSINE = "Cosine"
    LINEAR = "Linear"
    CONSTANT = "Constant"


class Batches(Choice):
    """Division of a step's samples over ranks and micro-batches: by their `Tokens`, joined without padding; or as equal numbers of padded
    `Rows`.
    """

    TOKENS = "Tokens"
    ROWS = "Rows"


class Balance(Choice):
    """Share of a step's tokens that each rank computes: `Equal` ones, or what the `Measured` speed and the memory of each rank's device
    allow.
    """

    EQUAL = "Equal"
    MEASURED = "Measured"


class NonFinitePolicy(Choice):
    """Reaction to a loss or a gradient that is not finite: the run ends, or that step is left out and counted."""

    STOP = "Stop"
    SKIP = "Skip"


class DataFormat(Choice):
    """Format of the samples in a file: told by its name, JSON lines, or plain text."""

    AUTO = "Auto"
    JSONL = "JSONL"
    TEXT = "Text"


class Overlong(Choice):
    """Treatment of a sample of more than maxLength tokens."""

    TRUNCATE = "Truncate"
    DROP = "Drop"
    SPLIT = "Split"
    ERROR = "Error"


class TrainOn(Choice):
    """Tokens that are learned: the assistant's (or the completion), its last turn only, or all."""

    ASSISTANT = "Assistant"
    LAST_TURN = "LastTurn"
    ALL = "All"


class OnBroken(Choice):
    """Treatment of lines of the data that can't be used: the run is refused, or they are left out and counted."""

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


ROW_KEYS = (
    "messages", "conversations", "prompt", "completion", "instruction", "output", "text", "input", "history", "system", "tools",
    "functions", "chat_template_kwargs",
)  # fmt: skip
"""All keys of a row that are read (lockstep_train/data/read/records.py)."""


class Tracker(Choice):
    """A service or folder that gets a run's metrics besides its JSONL files. Each reads its own usual environment variables."""

    TENSORBOARD = "TensorBoard"
    MLFLOW = "MLflow"
    WANDB = "WandB"


class Content(Choice):
    """Content of a checkpoint: FP32 masters and optimizer state, for an exact resume; or the trained weights alone."""

    FULL = "Full"
    LITE = "Lite"


STEP_SECONDS = 3600


@dataclass(frozen=True)
class Timeouts:
    """Limits in seconds. A rank that tells its own limits, as Lockstep's trainer does, is judged by those."""

    start_seconds: int = 1800
    """Until every node is here, and then until every rank has been heard. An image of 20 GB at 20 MB/s takes 17 minutes."""
    step_seconds: int | None = None
    """None: an hour. Lockstep's trainer then goes by the steps that it has measured (base/limits.py)."""
    evaluate_seconds: int = 7200
    save_seconds: int = 3600
    load_seconds: int = 14400
    export_seconds: int = 14400
    collective_seconds: int = 600
    """Until the other ranks of Lockstep's trainer join a collective operation."""
    return_seconds: int | None = None
    """Until a node that was here before is here again, such as a laptop that sleeps for a night. If it is set, every node is waited for
    within a limit. Null: as long as for its first start, and without an operator for as long as it takes.
    """

    def of_activity(self, activity: str) -> int:
        """An activity that isn't known counts as a step."""
        limits = {
            "Init": self.load_seconds,
            "Fetch": self.load_seconds,
            "Load": self.load_seconds,
            "Evaluate": self.evaluate_seconds,
            "Save": self.save_seconds,
            "Export": self.export_seconds,
        }
        return limits.get(activity, self.step_seconds or STEP_SECONDS)
