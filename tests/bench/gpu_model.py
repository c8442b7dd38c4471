"""A model of random weights, made on the device that trains it, and the trainers that take steps with it: Lockstep's, and Hugging Face's with PEFT.

All of them share the model's frozen weights, so that one card holds them side by side.
"""

from __future__ import annotations

import bisect
import copy
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from train_inputs import LEARNING_RATE, SEED, SHAPES

from lockstep_spec.choices import NonFinitePolicy
from lockstep_spec.fit import MemoryPlan, plan_memory
from lockstep_spec.memory import Place
from lockstep_spec.settings import size_settings
from lockstep_spec.training import TrainingConfig
from lockstep_train.base.limits import UNWATCHED
from lockstep_train.base.ranks import Ranks
from lockstep_train.base.runfile import parse_training
from lockstep_train.data.sequences.batches import Batch
from lockstep_train.engine import build
from lockstep_train.engine.clock import Clock
from lockstep_train.engine.step import Stepper
from lockstep_train.memory.agree import read_shape
from lockstep_train.report import Reporter

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Shape:
    """Model and settings of a row. `fits`: the dimension that is made as large as the memory plan allows, `layers` or `sequence`."""

    config: dict[str, Any]
    sequence: int
    micro: int
    gradient_checkpointing: bool
    fits: str | None = None
    rank: int = 16
    targets: tuple[str, ...] = ATTENTION


_QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "rope_theta": 1000000.0, "max_position_embeddings": 40960,
}  # fmt: skip
_TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_TINY_GLM = {
    "model_type": "glm4_moe", **_TINY, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "partial_rotary_factor": 0.5,
}  # fmt: skip
_TINY_QWEN = {"model_type": "qwen3_moe", **_TINY, "moe_intermediate_size": 32, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2}
_LONG = {**SHAPES["8b"].config, "max_position_embeddings": 1 << 20}
LARGE = {
    "8b-lora-4k": Shape(SHAPES["8b"].config, 4096, 2, gradient_checkpointing=False),
    "glm-air-4-layers-16k": Shape(SHAPES["glm-air-slice"].config, 16384, 1, gradient_checkpointing=True),
    "qwen3-30b-a3b": Shape(_QWEN3_30B_A3B, 4096, 2, gradient_checkpointing=True, fits="layers"),
    "8b-longest": Shape(_LONG, 4096, 1, gradient_checkpointing=True, fits="sequence"),
    "checkpoint": Shape(SHAPES["8b"].config, 4096, 2, gradient_checkpointing=False, rank=64, targets=LINEAR),
}
"""Rows of the benchmark: GLM-4.5-Air with 4 of its 46 layers, Qwen3-30B-A3B with as many of its 48 as fit, Llama-3-8B as it is."""
TINY = {
    "8b-lora-4k": Shape({"model_type": "llama", **_TINY}, 64, 2, gradient_checkpointing=False),
    "glm-air-4-layers-16k": Shape(_TINY_GLM, 96, 1, gradient_checkpointing=True),
    "qwen3-30b-a3b": Shape(_TINY_QWEN, 64, 2, gradient_checkpointing=True, fits="layers"),
    "8b-longest": Shape({"model_type": "llama", **_TINY}, 8, 1, gradient_checkpointing=True, fits="sequence"),
    "checkpoint": Shape({"model_type": "llama", **_TINY}, 64, 2, gradient_checkpointing=False, rank=8, targets=LINEAR),
}
"""The same rows where there is no GPU: the same code in seconds."""


def training_of(shape: Shape, folder: Path, precision: str) -> TrainingConfig:
    """The settings of the run. Writes config.json, by which the memory plan goes, into `folder`."""
    from transformers import AutoConfig

    options = dict(shape.config)
    AutoConfig.for_model(options.pop("model_type"), **options).save_pretrained(str(folder))
    return parse_training(
        {
            "model": {"name": str(folder)},
            "lora": {"rank": shape.rank, "alpha": 2 * shape.rank, "dropout": "0", "targetModules": list(shape.targets)},
            "zeroStage": "Stage2",
            "precision": precision,
            "seed": SEED,
            "data": {"path": "made on the device", "maxLength": shape.sequence},
            "optimization": {
                "epochs": 1,
                "learningRate": repr(LEARNING_RATE),
                "microBatchSize": shape.micro,
                "gradientCheckpointing": shape.gradient_checkpointing,
            },
            "evaluation": None,
            "checkpoint": {"everySteps": 1_000_000, "keep": 2, "resumeFrom": "None"},
        }
    )


def planned(training: TrainingConfig, device: torch.device, capacity_bytes: int) -> MemoryPlan:
    """The plan that a run of one rank prints."""
    shape = read_shape(Path(training.model.name))
    return plan_memory(shape, size_settings(training), Place(1, 1, gpu=device.type == "cuda"), capacity_bytes)


def fitted(shape: Shape, folder: Path, precision: str, device: torch.device, room_bytes: int) -> Shape:
    """The shape with what it leaves open as large as the plan says that there is room for."""
    if shape.fits is None:
        return shape

    def too_large(made: Shape) -> bool:
        return planned(training_of(made, folder, precision), device, room_bytes).total_bytes > room_bytes

    candidates = _candidates(shape)
    return candidates[max(0, bisect.bisect_left(candidates, True, key=too_large) - 1)]


def _candidates(shape: Shape) -> list[Shape]:
    """Sizes to try, from the smallest on. Sequences end at 32 times the shape's: beyond that attention makes a step take minutes."""
    if shape.fits == "sequence":
        return [replace(shape, sequence=times * shape.sequence) for times in range(1, 33)]
    whole = shape.config["num_hidden_layers"]
    return [replace(shape, config={**shape.config, "num_hidden_layers": layers}) for layers in range(1, whole + 1)]


def random_model(config: dict[str, Any], precision: str, device: torch.device) -> Any:
    """A causal language model with frozen weights, none of which has been anywhere but on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = dict(config)
    settled = AutoConfig.for_model(options.pop("model_type"), **options)
    torch.manual_seed(SEED)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(settled, dtype={"BF16": torch.bfloat16, "FP32": torch.float32}[precision])
    return model.requires_grad_(False)


def same_weights(model: Any) -> Any:
    """Another model over the same weights. Before anything wraps the first one."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


class Trainer:
    """Takes steps. `name` in tables."""

    name = ""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.losses: list[float] = []

    def ids(self, step: int) -> torch.Tensor:
        """[micro, sequence], of the step alone."""
        draw = torch.Generator(self.device).manual_seed(SEED + step)
        size = (self.shape.micro, self.shape.sequence)
        return torch.randint(0, self.shape.config["vocab_size"], size, generator=draw, device=self.device)

    def step(self, step: int) -> None:
        raise NotImplementedError

    def steps(self, first: int, count: int) -> float:
        """Seconds of so many steps, until the device has done them."""
        synchronize(self.device)
        started = time.perf_counter()
        for step in range(first, first + count):
            self.step(step)
        synchronize(self.device)
        return time.perf_counter() - started


class Lockstep(Trainer):
    """Its engine, loss and steps as a run has them, but for reading and writing: weights and samples are made on the device."""

    name = "lockstep"

    def __init__(self, shape: Shape, training: TrainingConfig, model: Any, ranks: Ranks) -> None:
        super().__init__(shape, ranks.device)
        build.load_base = lambda *_: model  # type: ignore[assignment]
        plan: Any = SimpleNamespace(accumulation=1, done=SimpleNamespace(steps=0))
        self.engine, loss, _ = build.start_model(training, Path(training.model.name), plan, ranks, Reporter(None, 0))
        self.saving = Saving()
        self._stepper = Stepper(self.engine, loss, ranks, self.saving, UNWATCHED, seed=SEED, policy=NonFinitePolicy.STOP)

    def step(self, step: int) -> None:
        ids = self.ids(step)
        batch = Batch(ids, ids, torch.ones_like(ids, dtype=torch.bool))
        tokens = ids.numel() - ids.shape[0]
        self.losses.append(self._stepper.take(step, [batch], tokens, lambda: False, Clock(self.device)).loss)


class Saving:
    """The part of a save that a step needs: `before_update` may be replaced by that of a save under way."""

    busy = False

    def __init__(self) -> None:
        self.wait: Callable[[], None] | None = None
        self.waited_seconds = 0.0

    def before_update(self) -> None:
        if self.wait is not None:
            waiting = time.perf_counter()
            self.wait()
            self.waited_seconds += time.perf_counter() - waiting


class HuggingFace(Trainer):
    """transformers and PEFT as Trainer drives them: the adapter in FP32, autocast, the model's own loss, fused AdamW, clipping to 1."""

    name = "hugging-face-peft"

    def __init__(self, shape: Shape, precision: str, model: Any, device: torch.device) -> None:
        super().__init__(shape, device)
        self.model = adapted(model, shape, in_fp32=True)
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        fused = True if device.type == "cuda" else None
        self._optimizer = torch.optim.AdamW(self._trained, lr=LEARNING_RATE, weight_decay=0.0, fused=fused)
        low = precision == "BF16"
        self._computing: Callable[[], Any] = (lambda: torch.autocast(device.type, torch.bfloat16)) if low else nullcontext

    def step(self, step: int) -> None:
        ids = self.ids(step)
        with self._computing():
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(float(loss.detach()))


class HuggingFaceDeepSpeed(Trainer):
    """The same over a DeepSpeed engine: ZeRO-2 with the settings of transformers' documentation."""

    name = "hugging-face-peft-deepspeed"

    def __init__(self, shape: Shape, precision: str, model: Any, device: torch.device) -> None:
        super().__init__(shape, device)
        import deepspeed

        wrapped = adapted(model, shape, in_fp32=False)
        trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
        settings = {
            "train_micro_batch_size_per_gpu": shape.micro,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": precision == "BF16"},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": 2, "overlap_comm": True, "reduce_scatter": True, "contiguous_gradients": True,
                "reduce_bucket_size": 2e8, "allgather_bucket_size": 2e8,
            },
            "steps_per_print": 1_000_000_000,
        }  # fmt: skip
        optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
        self.engine, *_ = deepspeed.initialize(model=wrapped, model_parameters=trained, optimizer=optimizer, config=settings)
        self.engine.train()

    def step(self, step: int) -> None:
        ids = self.ids(step)
        loss = self.engine(input_ids=ids, labels=ids, use_cache=False).loss
        self.engine.backward(loss)
        self.engine.step()
        self.losses.append(float(loss.detach()))


def adapted(model: Any, shape: Shape, *, in_fp32: bool) -> Any:
    """Give every trainer the same first adapter."""
    import peft

    if shape.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(SEED)
    lora = peft.LoraConfig(
        r=shape.rank, lora_alpha=2 * shape.rank, target_modules=list(shape.targets), lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    wrapped = peft.get_peft_model(model, lora, autocast_adapter_dtype=in_fp32)
    wrapped.train()
    return wrapped


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
