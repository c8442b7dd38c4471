"""A model of random weights, made on the device that trains it, and the trainers that take steps with it: Lockstep's, and Hugging Face's
with PEFT.

All of them share the model's frozen weights, so that one card holds them side by side.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy
import torch
from gpu_rows import BY_ROWS, DEFAULT, LIGER, PEFT, PLAIN, Row
from train_inputs import LEARNING_RATE, SEED
from transformers.utils import is_flash_attn_2_available

from lockstep_spec.choices import Balance, Batches, NonFinitePolicy
from lockstep_spec.fit import choose_recomputed, plan_memory
from lockstep_spec.memory import Place
from lockstep_spec.settings import size_settings
from lockstep_spec.training import TrainingConfig
from lockstep_train.balance import Shares, sizes_of
from lockstep_train.base.limits import UNWATCHED
from lockstep_train.base.ranks import Ranks
from lockstep_train.base.runfile import parse_training
from lockstep_train.data.sequences.batches import collate
from lockstep_train.data.tokens.encode import IGNORED, Example
from lockstep_train.engine import build
from lockstep_train.engine.clock import Clock
from lockstep_train.engine.step import Stepper
from lockstep_train.memory.agree import read_shape
from lockstep_train.memory.capacity import device_bytes
from lockstep_train.model.attention import cudnn_first
from lockstep_train.model.isolation import settle_batches
from lockstep_train.report import Reporter
from lockstep_train.steps import own_batches
from lockstep_train.zero import zero_access

PAD = 0
WORDS = 64
"""Different tokens in all samples. A model of random weights soon learns that there are no others, so that losses show what updates do."""


class Absent(Exception):
    """A trainer can't take part in a row here: why."""


def training_of(row: Row, folder: Path, precision: str, trainer: str = DEFAULT) -> TrainingConfig:
    """Return the settings of the run. Writes config.json, by which the memory plan goes, into `folder`."""
    from transformers import AutoConfig

    options = dict(row.config)
    AutoConfig.for_model(options.pop("model_type"), **options).save_pretrained(str(folder))
    sequence, micro = row.sizes(trainer)
    others = {PLAIN: {"batches": "Rows", "recompute": "All"}, BY_ROWS: {"batches": "Rows"}}
    return parse_training(
        {
            "model": {"name": str(folder)},
            "lora": {"rank": row.rank, "alpha": 2 * row.rank, "dropout": row.dropout, "targetModules": list(row.targets)},
            "zeroStage": "Stage2",
            "precision": precision,
            "seed": SEED,
            "data": {"path": "made here", "maxLength": sequence, "packing": row.packs(trainer)},
            "optimization": {"epochs": 1, "learningRate": repr(LEARNING_RATE), "microBatchSize": micro, **others.get(trainer, {})},
            "evaluation": None,
            "checkpoint": {"everySteps": 1_000_000, "keep": 2, "resumeFrom": "None"},
        }
    )


def random_model(config: dict[str, Any], precision: str, device: torch.device) -> Any:
    """Make a causal language model with frozen weights, none of which has been anywhere but on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = dict(config)
    settled = AutoConfig.for_model(options.pop("model_type"), **options)
    torch.manual_seed(SEED)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(settled, dtype={"BF16": torch.bfloat16, "FP32": torch.float32}[precision])
    return model.requires_grad_(False)


def same_weights(model: Any) -> Any:
    """Return another model over the same weights. Call it before anything wraps the first one."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


class Trainer:
    """A trainer of one model, with its `name` in tables."""

    def __init__(self, name: str, row: Row, device: torch.device) -> None:
        self.name, self.row, self.device = name, row, device
        self.losses: list[float] = []
        self.norms: list[float] = []
        """Norm of each step's gradients, before they are clipped."""
        self.notes: list[str] = []
        """Remarks on how it trains, for the table."""
        self.model: Any = None
        self.around: Callable[[], Any] = nullcontext
        """Context of its steps."""

    def examples(self, step: int) -> list[Example]:
        """Return a step's samples, which follow from the step alone."""
        draw = numpy.random.default_rng([SEED, step])
        made = []
        for lengths in self.row.documents(step):
            documents = [draw.integers(0, WORDS, length) for length in lengths]
            labels = [numpy.concatenate([[IGNORED], ids[1:]]) for ids in documents]
            if self.name in self.row.unpacked:
                made += [Example(*pair, "drawn") for pair in zip(documents, labels, strict=True)]
            else:
                bounds = lengths if self.row.packs(self.name) else ()
                made.append(Example(numpy.concatenate(documents), numpy.concatenate(labels), "drawn", bounds))
        return made

    def step(self, step: int) -> None:
        raise NotImplementedError

    def micro_losses(self, step: int) -> Iterator[torch.Tensor]:
        """Yield the part of each micro-batch in a step's loss."""
        raise NotImplementedError

    def probe(self, step: int, outputs: list[torch.Tensor]) -> tuple[float, float]:
        """Return loss and gradient norm of a step's samples without dropout, with the adapter's `outputs` (all B), drawn here if there are
        none yet. Nothing of it stays.
        """
        named = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        own = [parameter.data for name, parameter in named if "lora_B" in name]
        before = [each.clone() for each in own]
        outputs += [] if outputs else [0.02 * torch.randn_like(each) for each in own]
        torch._foreach_copy_(own, outputs)
        with self.around(), patch.object(torch.nn.Dropout, "forward", lambda _, states: states):
            loss = torch.stack(list(self.micro_losses(step))).sum()
            # not backward(), whose gradients would reach the engine and the optimizer
            gradients = torch.autograd.grad(loss, [parameter for _, parameter in named])
        torch._foreach_copy_(own, before)
        return float(loss.detach()), float(torch.nn.utils.get_total_norm([each.float() for each in gradients]))

    def steps(self, first: int, count: int) -> float:
        """Take so many steps, and return the seconds until the device has done them."""
        synchronize(self.device)
        started = time.perf_counter()
        with self.around():
            for step in range(first, first + count):
                self.step(step)
        synchronize(self.device)
        return time.perf_counter() - started


class Lockstep(Trainer):
    """Its engine, loss, division of steps and updates as a run has them, but for files: weights and samples are made here."""

    def __init__(self, name: str, row: Row, training: TrainingConfig, model: Any, ranks: Ranks) -> None:
        super().__init__(name, row, ranks.device)
        shape, capacity = read_shape(Path(training.model.name), ranks.device), device_bytes(ranks.device, 1) or 0
        micro, longest = training.optimization.micro_batch_size, training.data.max_length
        place = Place(1, 1, gpu=ranks.device.type == "cuda")
        settings, _ = choose_recomputed(shape, size_settings(training), place, [(micro, capacity)])
        self.plan = plan_memory(shape, settings, place, capacity)
        self.notes.append(f"computes again {settings.recomputed.words(row.config['num_hidden_layers'])}")
        build.load_base = lambda *_: model  # type: ignore[assignment]
        fresh: Any = SimpleNamespace(accumulation=1, done=SimpleNamespace(steps=0))
        self.engine, self._loss, _ = build.start_model(
            training, Path(training.model.name), fresh, ranks, Reporter(None, 0), settings.recomputed, joins=settings.joins
        )
        batches = training.optimization.batches
        settled = settle_batches(self.engine, training, batches, self.examples(1), micro, ranks.device, self.notes.append)
        self._ranks, self._shares = ranks, Shares(sizes_of(settled, Balance.EQUAL, micro, (micro,), longest), (0,))
        self.saving = Saving()
        self._stepper = Stepper(self.engine, self._loss, ranks, self.saving, UNWATCHED, seed=SEED, policy=NonFinitePolicy.STOP)
        self.model = self.engine.module
        if name != PLAIN:
            self.around = lambda: cudnn_first(ranks.device)

    def _work(self, step: int) -> tuple[list[Any], int]:
        """Return a step's micro-batches and its learned tokens."""
        examples = self.examples(step)
        lengths = [len(example.ids) for example in examples]
        batches = own_batches(self._shares, step, self._ranks, lengths, examples.__getitem__, PAD)
        return batches, sum(example.learned_tokens for example in examples)

    def step(self, step: int) -> None:
        batches, tokens = self._work(step)
        zero_access.set_counters(self.engine, step - 1, len(batches), self.row.samples or self.row.micro)
        result = self._stepper.take(step, batches, tokens, lambda: False, Clock(self.device))
        self.losses.append(result.loss)
        self.norms.append(result.gradient_norm)

    def micro_losses(self, step: int) -> Iterator[torch.Tensor]:
        batches, tokens = self._work(step)
        loss = copy.copy(self._loss)
        loss._engine = self.model  # DeepSpeed's engine would reduce the gradients
        return (loss(batch) / tokens for batch in batches)


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
    """transformers and PEFT as Trainer drives them: the adapter in FP32, autocast, the model's own loss over rows padded to the longest,
    fused AdamW, clipping to 1.
    """

    def __init__(self, name: str, row: Row, precision: str, model: Any, device: torch.device) -> None:
        super().__init__(name, row, device)
        self._varlen = row.packs(name) and is_flash_attn_2_available()
        if self._varlen:
            model.set_attn_implementation("flash_attention_2")
        if row.packs(name):
            self.notes.append(f"packed rows by {'flash-attn' if self._varlen else 'a block mask, since flash-attn is not installed'}")
        self.model = adapted(model, row)
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        fused = True if device.type == "cuda" else None
        self._optimizer = torch.optim.AdamW(self._trained, lr=LEARNING_RATE, weight_decay=0.0, fused=fused)
        low = precision == "BF16"
        self._computing: Callable[[], Any] = (lambda: torch.autocast(device.type, torch.bfloat16)) if low else nullcontext

    def step(self, step: int) -> None:
        total = torch.zeros((), device=self.device)
        for loss in self.micro_losses(step):
            loss.backward()
            total += loss.detach()
        self.norms.append(float(torch.nn.utils.clip_grad_norm_(self._trained, 1.0)))
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(float(total))

    def micro_losses(self, step: int) -> Iterator[torch.Tensor]:
        examples, (_, micro) = self.examples(step), self.row.sizes(self.name)
        tokens = sum(example.learned_tokens for example in examples)
        for first in range(0, len(examples), micro):
            rows = examples[first : first + micro]
            batch = collate(rows, rows[0], PAD, self.device, Batches.TOKENS if self._varlen else Batches.ROWS)
            inputs = {"input_ids": batch.ids, "labels": batch.labels, "use_cache": False, "num_items_in_batch": tokens}
            if not self._varlen and len({len(example.ids) for example in rows}) > 1:
                inputs["attention_mask"] = batch.real.long()
            if batch.documents is not None:
                given = batch.documents.arguments
                inputs |= {key: given[key] for key in given if key == "position_ids" or (self._varlen and key != "document_lengths")}
            with self._computing():
                loss = self.model(**inputs).loss
            yield loss


class Liger(HuggingFace):
    """The same trainer with Liger's kernels. They replace functions of transformers' module, too, which only this trainer's own steps may
    see.
    """

    def __init__(self, name: str, row: Row, precision: str, model: Any, device: torch.device) -> None:
        if device.type != "cuda":
            raise Absent("Liger's kernels need a GPU")
        module, values = apply_liger(model)
        super().__init__(name, row, precision, model, device)
        self.around = lambda: replaced(module, values)


def apply_liger(model: Any) -> tuple[ModuleType, dict[str, Any]]:
    """Give the model Liger's kernels, and return its module and what in it they replace, which isn't replaced yet. Raises Absent where
    there are none.
    """
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as known
    except ImportError as error:
        raise Absent(f"liger-kernel can't be imported: {error}") from error
    kind = model.config.model_type
    if kind not in known:
        raise Absent(f"liger-kernel has no kernels for model_type {kind}")
    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    known[kind](model=model)
    values = {name: value for name, value in vars(module).items() if name in before and before[name] is not value}
    for name in values:
        setattr(module, name, before[name])
    return module, values


@contextmanager
def replaced(module: ModuleType, values: dict[str, Any]) -> Iterator[None]:
    """Let a module have these values for a while."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def start_trainer(name: str, row: Row, model: Any, ranks: Ranks, folder: Path, precision: str) -> Trainer:
    """Start a trainer over a model of its own. Raises Absent where it can't take part."""
    if name in (PEFT, LIGER):
        return (Liger if name == LIGER else HuggingFace)(name, row, precision, model, ranks.device)
    return Lockstep(name, row, training_of(row, folder, precision, name), model, ranks)


def adapted(model: Any, row: Row) -> Any:
    """Return the model with the first adapter that every trainer has."""
    import peft

    if row.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(SEED)
    lora = peft.LoraConfig(
        r=row.rank, lora_alpha=2 * row.rank, target_modules=list(row.targets), lora_dropout=float(row.dropout), task_type="CAUSAL_LM"
    )
    wrapped = peft.get_peft_model(model, lora)
    wrapped.train()
    return wrapped


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
