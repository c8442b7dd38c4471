"""What a forked rank can be asked to do besides training: functions that look inside a real run. Not imported by the tests themselves."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import peft
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lockstep_train import __main__ as trainer
from lockstep_train import assemble as assembling
from lockstep_train.base import ranks as engine_ranks
from lockstep_train.base.ranks import Ranks
from lockstep_train.base.runfile import rank_environment, read_run
from lockstep_train.base.store import SignedStore
from lockstep_train.checkpoint.save.save import Saver
from lockstep_train.engine import step as engine_step
from lockstep_train.engine.loss import TokenLoss
from lockstep_train.loop import train
from lockstep_train.report import Reporter
from lockstep_train.run import Run
from lockstep_train.steps import Steps
from lockstep_train.watch.watchdog import StopSignal
from lockstep_train.zero import zero_access
from lockstep_train.zero.parameters import shards

SKIPPING = ("slow_volume", "copy_beside_a_step", "fail_unexpectedly")
"""Cases about ranks that go on beside a save, as they really do."""


def case_modules() -> list[ModuleType]:
    """This module and every cases_*.py beside it, in the order of their names."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("cases_*.py"))
    return [sys.modules[__name__], *(importlib.import_module(name) for name in names)]


def call(target: str, arguments: dict[str, Any]) -> int:
    """Run `main` (the trainer itself), or the one function of that name here or in a cases_*.py; the exit code."""
    if target not in SKIPPING:
        wait_for_saves()
    look_for_partitioned_weights()
    if target == "main":
        return trainer.main([])
    found = {function for module in case_modules() if (function := vars(module).get(target)) is not None}
    assert len(found) == 1, f"{len(found)} functions named {target!r} in rank_cases.py and cases_*.py: there must be one"
    return int(found.pop()(**arguments) or 0)


def wait_for_saves() -> None:
    """Steps take some 50 ms here, and a save longer than that when the machine's disk is busy: ranks wait for it before they meet, and
    none is skipped."""
    busy = Saver.busy.fget
    assert busy is not None

    def waited(saver: Saver) -> bool:
        while busy(saver):
            time.sleep(0.001)
        return False

    Saver.busy = property(waited)  # type: ignore[assignment, method-assign]


def look_for_partitioned_weights() -> None:
    """After each step under Stage3 no rank may hold a whole frozen weight: else the test would pass with weights that were never
    gathered.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    take = engine_step.Stepper.take

    def looked_at(stepper: Any, *arguments: Any, **options: Any) -> Any:
        result = take(stepper, *arguments, **options)
        weights = [item for item in stepper._engine.module.parameters() if hasattr(item, "ds_status") and not item.requires_grad]
        whole = [item.ds_shape for item in weights if item.ds_status is not ZeroParamStatus.NOT_AVAILABLE]
        assert not whole, f"after a step {len(whole)} of {len(weights)} frozen weights are whole, the first of shape {tuple(whole[0])}"
        return result

    engine_step.Stepper.take = looked_at  # type: ignore[method-assign]


def add_result(output: str, name: str, result: Any) -> None:
    """Add a variant's result to those in `output`: whole, whenever this rank is killed."""
    path = Path(output)
    results = json.loads(path.read_text()) if path.exists() else {}
    path.with_suffix(".tmp").write_text(json.dumps({**results, name: result}))
    path.with_suffix(".tmp").replace(path)


def end_as_told(variants: dict[str, str], output: str) -> None:
    """Rank 1 raises in one variant and is killed in another, while rank 0 waits for it."""
    ranks = engine_ranks.join(rank_environment())
    for name, end in variants.items():
        dist.barrier()  # the result before is written
        if end != "ends" and not ranks.first:
            if end == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(end)
        dist.barrier()
        if ranks.first:
            add_result(output, name, end)
    engine_ranks.leave()


def set_constants(constants: dict[str, float]) -> None:
    """Constants of the trainer, {"merge.BLOCK_ELEMENTS": 100}, for as long as this rank lives: with small ones what goes block by
    block does so with the small tensors here."""
    for path, value in constants.items():
        module, name = path.rsplit(".", 1)
        found = importlib.import_module(module if module.startswith("lockstep_spec.") else f"lockstep_train.{module}")
        assert isinstance(vars(found)[name], int | float), path
        setattr(found, name, value)


def main_with(constants: dict[str, float]) -> int:
    """Train with other constants."""
    set_constants(constants)
    return trainer.main([])


def assembled() -> Run:
    environment = rank_environment()
    ranks = engine_ranks.join(environment)
    return assembling.assemble(read_run(trainer.run_file([])), environment, ranks, Reporter(None, environment.rank))


def make_model(folder: str, hidden: int = 62) -> None:
    """A 2-layer Llama with shapes that divide by nothing, and a byte-level tokenizer with a BOS token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1, **{character: index + 2 for index, character in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=hidden, intermediate_size=127, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def resave() -> None:
    """Load the state a run would start from, and commit it again at once."""
    run = assembled()
    saved = run.saver.save(run.engine, run.plan.done.steps)
    assert saved.committed, saved.problem
    engine_ranks.leave()


def live_logits(output: str, constants: dict[str, int] | None = None) -> None:
    """Train to the end, then write the logits of the live engine, from rank 0."""
    set_constants(constants or {})
    run = assembled()
    train(run, StopSignal())
    run.engine.eval()
    with torch.no_grad():
        logits = run.engine(input_ids=torch.arange(40).view(2, 20), use_cache=False).logits
    if run.ranks.first:
        save_file({"logits": logits.contiguous()}, output)
    engine_ranks.leave()


def compare_adapters(model: str, adapters: list[str], logits: str, dtype: str) -> None:
    """Each folder as peft loads it gives exactly the live model's logits."""

    def logits_of(model: Any) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(input_ids=torch.arange(40).view(2, 20), use_cache=False).logits
        return found

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))

    live = load_file(logits)["logits"]
    for adapter in adapters:
        mine = logits_of(peft.PeftModel.from_pretrained(base(), adapter, autocast_adapter_dtype=False).eval())
        assert torch.equal(mine, live), (adapter, (mine - live).abs().max())
    assert not torch.equal(live, logits_of(base()))


class CountCollectives(TorchDispatchMode):
    """Sees every c10d operator, also those that DeepSpeed calls by references it took at import."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in str(function):
            self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def poisoned_padding() -> None:
    """Fill the padding of every Stage3 chunk with NaN after a step, then save: none of it may reach a shard."""
    run = assembled()
    Steps(run, StopSignal()).take(1)
    padded = 0
    for _, parameter in zero_access.trainable(run.engine):
        _, _, numel = next(shards(parameter))
        for kind in zero_access.KINDS:
            tail = zero_access._stage3_tensor(run.engine.optimizer, parameter, kind).detach()[numel:]
            padded += tail.numel()
            tail.fill_(float("nan"))
    saved = run.saver.save(run.engine, 1)
    total = torch.tensor(padded)
    dist.all_reduce(total)
    assert total > 0, "no padding: the shapes of the test model divide evenly"
    shard = next(saved.folder.glob(f"shard-r{run.ranks.rank:05d}-*"))
    assert all(torch.isfinite(tensor).all() for tensor in load_file(shard).values())
    engine_ranks.leave()


def non_finite(step: int, rank: int) -> int:
    """Train with a loss that is NaN on one rank at one step."""
    real = TokenLoss.__call__
    calls = {"step": 0}

    def seed(seed: int, at: int, micro: int, on: int) -> None:
        calls["step"] = at

    def poisoned(self: TokenLoss, *batch: Any) -> torch.Tensor:
        loss = real(self, *batch)
        return loss * float("nan") if calls["step"] == step and os.environ["RANK"] == str(rank) else loss

    engine_step.seed_micro_batch = seed
    TokenLoss.__call__ = poisoned
    return trainer.main([])


def out_of_memory() -> int:
    def exhausted(self: TokenLoss, *batch: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    TokenLoss.__call__ = exhausted
    return trainer.main([])


def terminate_at(step: int, rank: int) -> int:
    """Train, and get SIGTERM on one rank alone while `step` is computed."""
    real = engine_step.seed_micro_batch

    def seed(seed: int, at: int, micro: int, on: int) -> None:
        if at == step and micro == 0 and on == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        real(seed, at, micro, on)

    engine_step.seed_micro_batch = seed
    return trainer.main([])


def broken_layout() -> int:
    """A DeepSpeed whose fragments are elsewhere than we think: shift every one by one element."""
    real = zero_access.fragments

    def shifted(engine: Any, kinds: Any = zero_access.KINDS) -> Any:
        for fragment in real(engine, kinds):
            yield dataclasses.replace(fragment, start=fragment.start + 1)

    zero_access.fragments = shifted
    return trainer.main([])


def make_demo(models: str, datasets: str) -> int:
    """The demo with a pretraining of two steps."""
    from lockstep_train.demo import __main__ as demo
    from lockstep_train.demo import model as demo_model

    demo_model.STEPS = 2
    return demo.main(["--models", models, "--datasets", datasets])


def with_own_keys(ranks: Ranks, name: str) -> Ranks:
    """The same ranks with keys of their own on the store: those of another secret are others."""
    return dataclasses.replace(ranks, store=SignedStore(ranks.store._store, name.encode(), timedelta(minutes=10)))  # type: ignore[attr-defined]
