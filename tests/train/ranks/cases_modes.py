"""A rank function that saves and loads in every mode of DeepSpeed that is used, in one process group."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from rank_cases import CountCollectives, add_result, set_constants, with_own_keys
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from lockstep_train.base import ranks as engine_ranks
from lockstep_train.base.runfile import rank_environment
from lockstep_train.checkpoint.format.identity import Identity
from lockstep_train.checkpoint.format.layout import kinds_of
from lockstep_train.checkpoint.format.manifest import Manifest, ShardRecord, decode, shapes
from lockstep_train.checkpoint.format.shards import ShardReader, local_fetch
from lockstep_train.checkpoint.save.replicas import local_only
from lockstep_train.checkpoint.save.save import Job, Saved, Saver
from lockstep_train.checkpoint.save.upkeep import Upkeep
from lockstep_train.zero import zero_access
from lockstep_train.zero.kinds import FULL, LITE, WEIGHTS
from lockstep_train.zero.self_test import self_test
from lockstep_train.zero.start import prepare_deepspeed

STEPS = {"Full": 1, "Lite": 2}
"""Each is committed as a step of its own: the keys in the store are named by it."""
BATCH = torch.arange(40).view(2, 20)


@dataclass(frozen=True)
class Mode:
    """What a user can make of ZeRO: a stage and its settings, a precision, what is trained."""

    stage: int
    zero: dict[str, Any] = field(default_factory=dict)
    precision: str = "BF16"
    full: bool = False
    groups: int = 1


DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32}


def make_engine(mode: Mode, seed: int) -> Any:
    """Odd shapes, so that chunks are padded and parameters are cut; `seed` draws what is trained."""
    torch.manual_seed(3 if not mode.full else seed)
    config = LlamaConfig(
        vocab_size=101, hidden_size=62, intermediate_size=127, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, tie_word_embeddings=mode.full,
    )  # fmt: skip
    model: torch.nn.Module = LlamaForCausalLM(config).to(DTYPES[mode.precision])
    torch.manual_seed(seed)
    if not mode.full:
        lora = peft.LoraConfig(r=5, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)  # type: ignore[arg-type]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": trainable[number :: mode.groups]} for number in range(mode.groups)]
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": mode.precision == "BF16"},
        "fp16": {"enabled": mode.precision == "FP16", "initial_scale_power": 4},
        "zero_optimization": {"stage": mode.stage, "overlap_comm": False, **mode.zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
    }
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    deepspeed = prepare_deepspeed()
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed's check of the CPU is older than torch's support
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, optimizer=optimizer, config=settings)
    return engine


def loss_of(engine: Any) -> float:
    with torch.no_grad():
        return float(engine(input_ids=BATCH, labels=BATCH, use_cache=False).loss)


def step(engine: Any) -> None:
    engine.backward(engine(input_ids=BATCH, labels=BATCH, use_cache=False).loss)
    engine.step()


def manifest_of(world_size: int, content: str) -> Manifest:
    identity = Identity(base="", parameters="", dataset="", seed=0, global_batch_size=1)
    return Manifest(
        step=STEPS[content],
        attempt=1,
        job="modes",
        job_uid=None,
        world_size=world_size,
        zero_stage="",
        precision="",
        base_model="",
        identity=identity,
        samples_consumed=0,
        optimizer_step=1,
        eval_loss_before=None,
        adapter={"config": {}, "names": {}},
        shards=(),
        content=content,
    )


def save_quietly(engine: Any, ranks: engine_ranks.Ranks, folder: Path, content: str) -> ShardReader:
    """Save without a collective in any thread; a reader of the commit."""
    ranks = with_own_keys(ranks, str(folder))
    upkeep = Upkeep(folder, 2, local_only(ranks), print, mine=ranks.first)
    saver = Saver(ranks, folder, 1, upkeep, lambda step: manifest_of(ranks.world_size, content), kinds_of(content))
    with quiet(saver) as seen:
        saved = saver.save(engine, STEPS[content])
    assert saved.committed, saved.problem
    assert seen == [], seen
    manifest = decode((saved.folder / "manifest.json").read_bytes())
    assert shapes(manifest.shards) == zero_access.parameter_shapes(engine)
    return ShardReader(saved.folder, manifest)


@contextlib.contextmanager
def quiet(saver: Saver) -> Iterator[list[str]]:
    """Collectives of the training thread and of the save's own: a dispatch mode sees only its thread."""
    seen: list[str] = []
    background: Callable[[Job], Saved] = saver._save

    def watched(job: Job) -> Saved:
        with CountCollectives() as beside:
            try:
                return background(job)
            finally:
                seen.extend(beside.seen)

    saver._save = watched  # type: ignore[method-assign]
    with CountCollectives() as starting:
        yield seen
    seen.extend(starting.seen)


def whole(reader: ShardReader, folder: Path, name: str, kind: str) -> torch.Tensor:
    """A parameter straight from the files, without the trainer's own reader."""
    shape = reader.shapes[name]
    values = torch.full((torch.Size(shape).numel(),), float("nan"))
    shards: tuple[ShardRecord, ...] = decode((folder / "manifest.json").read_bytes()).shards
    for shard in shards:
        tensor, offset = load_file(folder / shard.file)[kind], 0
        for item in shard.fragments:
            if item.name == name:
                values[item.start : item.start + item.numel] = tensor[offset : offset + item.numel]
            offset += item.numel
    return values.view(shape)


def check_contents(engine: Any, ranks: engine_ranks.Ranks, folder: Path, dtype: torch.dtype) -> ShardReader:
    """Full and Lite commits hold what DeepSpeed's public function gives."""
    full = save_quietly(engine, ranks, folder / "full", "Full")
    lite = save_quietly(engine, ranks, folder / "lite", "Lite")
    for name, master in zero_access.gather_masters(engine):
        assert torch.equal(whole(full, folder / "full/step-1.a1", name, FULL[0]), master), name
        assert torch.equal(whole(lite, folder / "lite/step-2.a1", name, WEIGHTS), master.to(dtype).float()), name
    return full


def check_self_test(engine: Any) -> None:
    """It passes on the DeepSpeed there is, and fails on one whose fragments, of any kind, are elsewhere."""
    self_test(engine)
    real = zero_access.fragments
    for kinds in (FULL, LITE):

        def shifted(engine: Any, asked: Any = FULL, kinds: Any = kinds) -> Any:
            for item in real(engine, asked):
                moved = {kind: torch.roll(tensor, 1) for kind, tensor in item.tensors.items()} if asked == LITE else item.tensors
                yield (
                    dataclasses.replace(item, start=item.start + 1 if asked != LITE else item.start, tensors=moved)
                    if asked == kinds
                    else item
                )

        zero_access.fragments = shifted
        try:
            self_test(engine)
        except zero_access.UnknownDeepSpeed:
            continue
        finally:
            zero_access.fragments = real
        raise AssertionError(f"a layout that is not ours was taken for ours ({kinds})")


def every_mode(folder: str, variants: dict[str, Any], output: str) -> None:
    """Variants are the fields of modes. Shards are copied and written in several parts."""
    set_constants({"checkpoint.save.snapshot.CHUNK_ELEMENTS": 100, "lockstep_spec.files.WRITE_BYTES": 4096})
    ranks = engine_ranks.join(rank_environment())
    for name, fields in variants.items():
        mode = Mode(**fields)
        engine = make_engine(mode, seed=7)
        check_self_test(engine)
        step(engine)
        reader = check_contents(engine, ranks, Path(folder) / name.replace(" ", "-"), DTYPES[mode.precision])
        expected, scaler = loss_of(engine), zero_access.loss_scaler_state(engine)
        assert (scaler is not None) == (mode.precision == "FP16")
        again = make_engine(mode, seed=8)
        assert loss_of(again) != expected  # and hpZ has made its second copies
        zero_access.restore(again, local_fetch(reader), 1)
        zero_access.restore_loss_scaler(again, scaler)
        assert loss_of(again) == expected, f"{name}: the first forward pass after loading is another's"
        assert zero_access.loss_scaler_state(again) == scaler
        step(engine)
        step(again)
        assert loss_of(again) == loss_of(engine), f"{name}: the step after loading is another's"
        dist.barrier()
        if ranks.first:
            add_result(output, name, {"loss": expected})
    engine_ranks.leave()
