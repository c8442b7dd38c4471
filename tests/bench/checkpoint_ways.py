"""Ways to save the same state, for checkpoint.py. Each is given what suits it best: buffers it may reuse, and flat tensors."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep_train.base.ranks import Ranks
from lockstep_train.checkpoint.format.identity import Identity
from lockstep_train.checkpoint.format.layout import CommitName
from lockstep_train.checkpoint.format.manifest import Manifest
from lockstep_train.checkpoint.save.replicas import local_only
from lockstep_train.checkpoint.save.save import Saved, Saver
from lockstep_train.checkpoint.save.upkeep import Upkeep
from lockstep_train.zero import zero_access
from lockstep_train.zero.kinds import FULL, LITE, MASTER, MOMENTS
from lockstep_train.zero.self_test import self_test
from lockstep_train.zero.start import prepare_deepspeed

STEPS = 2
TOKENS = 64
BF16 = torch.cpu._is_avx512_bf16_supported()
"""True if the CPU has instructions for it: without them a step would take tens of seconds. Masters and moments are FP32 either way."""
VOCABULARY = 512


def make_engine(lora_rank: int) -> Any:
    """25 million frozen weights, and 78,848 trained ones for each rank of LoRA."""
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    deepspeed = prepare_deepspeed()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = peft.LoraConfig(r=lora_rank, lora_alpha=lora_rank, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(LlamaForCausalLM(config).to(torch.bfloat16 if BF16 else torch.float32), lora, autocast_adapter_dtype=False)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": BF16},
        "zero_optimization": {"stage": 3, "overlap_comm": False, "stage3_gather_16bit_weights_on_model_save": True},
        "steps_per_print": 1_000_000_000,
    }
    optimizer = torch.optim.AdamW(trainable, lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, optimizer=optimizer, config=settings)
    self_test(engine)
    return engine


def train_step(engine: Any, before_update: Callable[[], None] | None = None) -> float:
    """One step; how long it waited for a save before the update."""
    ids = torch.randint(0, VOCABULARY, (1, TOKENS))
    engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
    waiting = time.monotonic()
    if before_update is not None:
        before_update()
    waited = time.monotonic() - waiting
    engine.step()
    return waited


class Way:
    """A way to save. `start` is the call; `done` waits until all is durable and says when that was."""

    name = ""

    def __init__(self, engine: Any, ranks: Ranks, folder: Path) -> None:
        self.engine, self.ranks = engine, ranks
        self.root = folder / self.name
        self.parameters = sum(torch.Size(shape).numel() for shape in zero_access.parameter_shapes(engine).values())
        self.called = 0.0
        self._beside = ThreadPoolExecutor(1)
        self._durable: Future[float] = Future()
        if ranks.first:
            self.root.mkdir(parents=True)
        dist.barrier()

    def folder(self, step: int) -> Path:
        return self.root / f"step-{step}"

    def start(self, step: int) -> None:
        self.called = time.monotonic()
        self._start(step)

    def _start(self, step: int) -> None:
        raise NotImplementedError

    def before_update(self) -> None:
        """Wait for everything that must be done before the optimizer may step."""

    def done(self) -> float:
        return self._durable.result()

    def _sync_beside(self, folder: Path) -> None:
        """Sync the files of a way that doesn't do it itself, beside the training."""
        self._durable = self._beside.submit(sync_tree, folder)


def sync_tree(folder: Path) -> float:
    """Make every file and every name in the folder durable; when that was done."""
    for path in [folder.parent, folder, *folder.rglob("*")]:
        with contextlib.suppress(FileNotFoundError):  # the other rank's temporary file
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    return time.monotonic()


class Lockstep(Way):
    name = "lockstep"
    kinds = FULL
    first_step = 0

    def __init__(self, engine: Any, ranks: Ranks, folder: Path) -> None:
        super().__init__(engine, ranks, folder)
        identity = Identity(base="", parameters="", dataset="", seed=0, global_batch_size=RANKS)

        def describe(step: int) -> Manifest:
            return Manifest(
                step=step,
                attempt=1,
                job="bench",
                job_uid=None,
                world_size=ranks.world_size,
                zero_stage="Stage3",
                precision="BF16" if BF16 else "FP32",
                base_model="",
                identity=identity,
                samples_consumed=step,
                optimizer_step=zero_access.optimizer_step(engine),
                eval_loss_before=None,
                adapter={"config": {}, "names": {}},
                shards=(),
            )

        upkeep = Upkeep(self.root, 1_000, local_only(ranks), print, mine=ranks.first)
        self._saver = Saver(ranks, self.root, 1, upkeep, describe, self.kinds, self._told)
        self._committed = 0.0
        self._saving: Future[Saved]

    def folder(self, step: int) -> Path:
        return self.root / str(CommitName(attempt=1, step=self.first_step + step))

    def _start(self, step: int) -> None:
        self._saving = self._saver.start(self.engine, self.first_step + step)

    def _told(self, saved: Saved) -> None:
        """Note the time once all is durable, before rotation removes older commits, which is a part of what the save adds."""
        self._committed = time.monotonic()
        assert not self.ranks.first or saved.committed, saved.problem

    def done(self) -> float:
        self._saving.result()
        return self._committed

    def before_update(self) -> None:
        self._saver.before_update()


class LockstepLite(Lockstep):
    name = "lockstep-lite"
    kinds = LITE
    first_step = 1_000_000  # a step is committed once in a run, and both savers share a store


class DeepSpeed(Way):
    name = "deepspeed"

    def _start(self, step: int) -> None:
        self.engine.save_checkpoint(str(self.root), tag=f"step-{step}", exclude_frozen_parameters=True)
        self._sync_beside(self.folder(step))


class Dcp(Way):
    """torch.distributed.checkpoint of each rank's flat masters and moments, the few large tensors that it saves fastest."""

    def _state(self) -> dict[str, torch.Tensor]:
        optimizer = self.engine.optimizer
        state = {}
        for number, flat in enumerate(zero_access._flat_masters(optimizer)):
            for kind, tensor in ((MASTER, flat), *((moment, optimizer.optimizer.state[flat][moment]) for moment in MOMENTS)):
                state[f"rank{self.ranks.rank}.{kind}.{number}"] = tensor.detach()
        return state

    def _writer(self, step: int) -> Any:
        from torch.distributed.checkpoint import FileSystemWriter

        return FileSystemWriter(self.folder(step), sync_files=True)


class DcpSync(Dcp):
    name = "dcp-sync"

    def _start(self, step: int) -> None:
        from torch.distributed.checkpoint import save

        save(self._state(), storage_writer=self._writer(step))
        self._sync_beside(self.folder(step))


class DcpAsync(Dcp):
    name = "dcp-async"

    def __init__(self, engine: Any, ranks: Ranks, folder: Path) -> None:
        super().__init__(engine, ranks, folder)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._group = dist.new_group(backend="gloo")
        cuda = torch.cuda.is_available()  # pinned memory and copies that run by themselves need a GPU
        self._stager = DefaultStager(
            StagingOptions(use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda)
        )

    def _start(self, step: int) -> None:
        from torch.distributed.checkpoint import async_save

        saving = async_save(self._state(), storage_writer=self._writer(step), process_group=self._group, async_stager=self._stager)
        folder = self.folder(step)

        def finish() -> float:
            saving.result()  # type: ignore[union-attr]
            return sync_tree(folder)

        self._durable = self._beside.submit(finish)


class HuggingFace(Way):
    """Save as Trainer.save_model does under ZeRO-3: gather every weight on every rank, and let rank 0 write the adapter."""

    name = "huggingface-gathered"

    def _start(self, step: int) -> None:
        weights = self.engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        if self.ranks.first:
            self.engine.module.save_pretrained(str(self.folder(step)), state_dict=weights, safe_serialization=True)
            self._sync_beside(self.folder(step))
        else:
            self._durable = Future()
            self._durable.set_result(time.monotonic())


RANKS = 2


def all_ways(engine: Any, ranks: Ranks, folder: Path) -> list[Way]:
    warnings.simplefilter("ignore")
    return [way(engine, ranks, folder) for way in (Lockstep, DeepSpeed, DcpSync, DcpAsync, LockstepLite, HuggingFace)]


class CollectiveBytes(TorchDispatchMode):
    """Bytes of the tensors given to c10d operators in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in str(function):
            self.bytes += sum(tensor.nbytes for tensor in _tensors(args))
        return function(*args, **(kwargs or {}))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


def collective_bytes(call: Callable[[], Any]) -> int:
    """Bytes that `call` gives to collectives, in this thread and in the threads that it uses."""
    counts: list[CollectiveBytes] = [CollectiveBytes()]
    submit, guard = ThreadPoolExecutor.submit, threading.Lock()

    def watched(self: ThreadPoolExecutor, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        def counted() -> Any:
            with CollectiveBytes() as mode:
                with guard:
                    counts.append(mode)
                return function(*arguments, **options)

        return submit(self, counted)

    ThreadPoolExecutor.submit = watched  # type: ignore[method-assign]
    try:
        with counts[0]:
            call()
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
    return sum(count.bytes for count in counts)
