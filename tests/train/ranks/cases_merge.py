"""Merged models and exports beside the live ones: adapters with random weights on tiny models of every kind, written as a commit of two
ranks.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cases_models import VOCABULARY, configuration, logits_of, settings
from rank_cases import add_result, set_constants
from safetensors.torch import load_file, save, save_file

from lockstep_spec.choices import Content
from lockstep_spec.training import TrainingConfig
from lockstep_train import merge
from lockstep_train.base.errors import ConfigError
from lockstep_train.checkpoint.commits import newest_whole
from lockstep_train.checkpoint.format.identity import Identity
from lockstep_train.checkpoint.format.layout import MANIFEST, shard_file
from lockstep_train.checkpoint.format.manifest import FragmentRecord, Manifest, ShardRecord, encode
from lockstep_train.logprobs import as_base, top_of
from lockstep_train.model import merger
from lockstep_train.model.base_files import hash_base
from lockstep_train.model.load import base_digest, model_class, quiet_transformers
from lockstep_train.model.trained import describe_trained, make_trainable
from lockstep_train.model.weight_files import PRECISIONS
from lockstep_train.proof import __main__ as proof
from lockstep_train.proof.__main__ import ExportedCommit, export_for, read_by_transformers, verify
from lockstep_train.proof.compare import compare

RANKS = 2


def make_base(folder: Path, family: str, precision: torch.dtype, shard_size: str) -> None:
    settled = configuration(family)
    settled.save_pretrained(folder)
    torch.manual_seed(3)
    model = model_class(folder).from_config(settled).to(precision)
    model.save_pretrained(folder, max_shard_size=shard_size)
    (folder / "tokenizer.json").write_text('{"kept": true}')


def commit_state(folder: Path, values: dict[str, torch.Tensor], training: TrainingConfig, base: Path, adapter: dict[str, Any]) -> None:
    """A `Full` or `Lite` commit of step 7: each parameter cut in two unequal fragments."""
    folder.mkdir(parents=True)
    lite = training.checkpoint.content.value == "Lite"
    shards = []
    for rank in range(RANKS):
        records, parts = [], []
        for name, value in values.items():
            cut = value.numel() * 2 // 3
            start, end = ((0, cut), (cut, value.numel()))[rank]
            records.append(FragmentRecord(name, tuple(value.shape), start, end - start))
            parts.append(value.flatten()[start:end])
        flat = torch.cat(parts)
        kinds = (
            {"weights": flat.to(PRECISIONS[training.precision])} if lite else {"fp32": flat, "exp_avg": flat * 0, "exp_avg_sq": flat * 0}
        )
        content = save(kinds)
        (folder / shard_file(rank, RANKS)).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        shards.append(ShardRecord(shard_file(rank, RANKS), len(content), digest, tuple(records), (0,)))
    manifest = Manifest(
        step=7,
        attempt=1,
        job="merged",
        job_uid=None,
        world_size=RANKS,
        zero_stage="Stage2",
        precision=training.precision.value,
        base_model=str(base),
        identity=Identity(base=base_digest(base), parameters="", dataset="", seed=1, global_batch_size=1, base_files=hash_base(base)),
        samples_consumed=7,
        optimizer_step=7,
        eval_loss_before=None,
        adapter=adapter,
        shards=tuple(shards),
        content=training.checkpoint.content.value,
    )
    (folder / MANIFEST).write_bytes(encode(manifest))


@torch.no_grad()
def randomize(model: Any, full: bool) -> dict[str, torch.Tensor]:
    """Trainable parameters in FP32, moved so far that any mistake shows."""
    draw = torch.Generator().manual_seed(5)
    values = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=draw) * (0.02 if full else 0.1)
            master = noise if "lora_A" in name or "lora_B" in name else parameter.float() + noise
            parameter.copy_(master)
            values[name] = master
    return values


def merge_variant(folder: Path, variant: dict[str, Any]) -> dict[str, Any]:
    base = folder / "base"
    training = settings(base, "Stage2", variant)
    training = replace(training, checkpoint=replace(training.checkpoint, content=Content(variant.get("content", "Full"))))
    dtype = PRECISIONS[training.precision]
    make_base(base, variant["family"], dtype, variant.get("shards", "50GB"))
    loader = model_class(base)
    model = make_trainable(loader.from_pretrained(base, dtype=dtype), training, fresh=True)
    adapter = describe_trained(model, training)
    values = randomize(model, adapter["config"] is None)
    commit_state(folder / "run/checkpoints/step-7.a1", values, training, base, adapter)
    live = logits_of(model)
    merged_folder = folder / "merged"
    with redirect_stdout(io.StringIO()) as said:
        code = merge.main([str(folder / "run/checkpoints/step-7.a1"), "--output", str(merged_folder)])
    if code:
        return {"code": code}
    loaded, report = loader.from_pretrained(merged_folder, dtype=dtype, output_loading_info=True)
    mine = logits_of(loaded)
    result = {
        "code": 0,
        "difference": ((mine - live).abs().max() / live.abs().max()).item(),
        "moved": ((logits_of(loader.from_pretrained(base, dtype=dtype)) - live).abs().max() / live.abs().max()).item(),
        "missing": sorted(map(str, report["missing_keys"])),
        "unexpected": sorted(map(str, report["unexpected_keys"])),
        "files": sorted(path.name for path in merged_folder.iterdir()),
        "base_files": sorted(path.name for path in base.iterdir()),
        "tied": json.loads((merged_folder / "config.json").read_text()).get("tie_word_embeddings"),
        "shapes_kept": shapes_kept(base, merged_folder),
        "said": said.getvalue(),
    }
    if adapter["config"] is not None:
        result["adapters"] = merged_adapters(folder, model)
    if adapter["config"] is not None and not variant.get("separate"):
        result["peft_difference"] = ((mine - logits_of(model.merge_and_unload())).abs().max() / live.abs().max()).item()
    return result


def merged_adapters(folder: Path, model: Any) -> dict[str, bool]:
    """Whether the adapter's folder, as Lockstep exports it and as PEFT itself saves it, becomes the commit's merged model to the bit."""
    assert proof.main([str(folder / "run/checkpoints/step-7.a1"), "--output", str(folder / "exported")]) == 0
    model.save_pretrained(folder / "saved")
    equal = {}
    for name in ("exported", "saved"):
        target = folder / f"merged-{name}"
        code = merge.main([str(folder / name), "--base", str(folder / "base"), "--output", str(target)])
        files = [path.name for path in (folder / "merged").iterdir() if path.name.endswith((".safetensors", ".index.json", "config.json"))]
        equal[name] = code == 0 and all((target / file).read_bytes() == (folder / "merged" / file).read_bytes() for file in files)
    return equal


def shapes_kept(base: Path, merged_folder: Path) -> bool:
    """Every tensor of the base is in the same file with the same shape and dtype."""
    return all(
        {(name, value.shape, value.dtype) for name, value in load_file(path).items()}
        <= {(name, value.shape, value.dtype) for name, value in load_file(merged_folder / path.name).items()}
        for path in base.glob("*.safetensors")
    )


def merge_variants(folder: str, variants: dict[str, Any], output: str) -> None:
    """All but those that say otherwise block by block."""
    quiet_transformers()
    usual = merger.BLOCK_ELEMENTS
    for name, variant in variants.items():
        place = Path(folder) / name.replace(" ", "-")
        place.mkdir()
        set_constants({"model.merger.BLOCK_ELEMENTS": 1000 if variant.get("blocks", True) else usual})
        add_result(output, name, merge_variant(place, variant))


CPU = torch.device("cpu")
WEIGHTS = "adapter_model.safetensors"


def recording(model: Any, precision: str) -> dict[str, Any]:
    """What a run of these models records; `base_top` is missing for a model without an adapter."""
    model.eval()
    draw = torch.Generator().manual_seed(9)
    prompts = [{"tokens": torch.randint(0, VOCABULARY, (20,), generator=draw).tolist(), "positions": [3, 8, 13, 18]} for _ in range(8)]
    tops = [top_of(model, prompt, CPU) for prompt in prompts]
    with as_base(model):
        bases = [top_of(model, prompt, CPU) if hasattr(model, "peft_config") else None for prompt in prompts]
    parts = zip(prompts, tops, bases, strict=True)
    numbered = [{**prompt, "top": top, "base_top": base} for prompt, top, base in parts]
    return {"format": 1, "precision": precision, "quantization": "None", "model_type": "", "prompts": numbered}


def prove_variant(folder: Path, variant: dict[str, Any]) -> dict[str, Any]:
    base, run = folder / "base", folder / "run"
    training = settings(base, "Stage2", variant)
    dtype = PRECISIONS[training.precision]
    make_base(base, variant["family"], dtype, "50GB")
    model = make_trainable(model_class(base).from_pretrained(base, dtype=dtype), training, fresh=True)
    adapter = describe_trained(model, training)
    values = randomize(model, adapter["config"] is None)
    commit = run / "checkpoints/step-7.a1"
    commit_state(commit, values, training, base, adapter)
    (run / "logprobs").mkdir()
    (run / "logprobs/step-7.a1.json").write_text(json.dumps(recording(model, training.precision.value)))
    result: dict[str, Any] = {}
    source = ExportedCommit([commit], *newest_whole([commit], "export"), None)
    for engine in ("peft", "merged", "vllm"):
        output = folder / engine
        try:
            export_for(engine, source, output)
        except ConfigError as error:
            result[engine] = {"refused": str(error)}
            continue
        if engine == "vllm":
            result[engine] = {
                "difference": stored_difference(base, output, folder / "merged"),
                "names": sorted(load_file(output / WEIGHTS)),
            }
        else:
            _, verdict = verify(engine, source, output)
            result[engine] = {"largest": verdict.largest, "equal": verdict.equal, "proves": verdict.proves}
    if variant.get("spoil"):
        recorded = json.loads((folder / "peft/logprobs.json").read_text())
        result["uncaught"] = [name for name in spoilt(folder / "peft", folder / "spoilt") if equal(base, folder / "spoilt", recorded)]
        result["tensors"] = len(load_file(folder / "peft" / WEIGHTS))
    return result


def equal(base: Path, adapter: Path, recorded: dict[str, Any]) -> bool:
    try:
        return compare(recorded, read_by_transformers(base, adapter, recorded)).equal
    except ConfigError:
        return False


def spoilt(adapter: Path, copy: Path) -> Iterator[str]:
    """Yield the name of each tensor three times: `copy` is the adapter without it, with another's values, and with twice its own."""
    tensors = load_file(adapter / WEIGHTS)
    for name, tensor in tensors.items():
        other = next((value for key, value in tensors.items() if key != name and value.shape == tensor.shape), tensor.flip(0))
        dropped = {key: value for key, value in tensors.items() if key != name}
        for way, changed in {"dropped": dropped, "swapped": tensors | {name: other}, "scaled": tensors | {name: tensor * 2}}.items():
            shutil.copytree(adapter, copy)
            save_file({key: value.clone() for key, value in changed.items()}, copy / WEIGHTS, metadata={"format": "pt"})
            yield f"{name} {way}"
            shutil.rmtree(copy)


def stored_difference(base: Path, adapter: Path, merged: Path) -> float:
    """The largest difference of the base's stored tensors with this adapter's factors from the merged model's."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    factors, before, after = load_file(adapter / WEIGHTS), load_file(base / "model.safetensors"), load_file(merged / "model.safetensors")
    for name in {name.rpartition(".lora_A")[0] for name in factors if ".lora_A." in name}:
        a, b = factors[f"{name}.lora_A.weight"].float(), factors[f"{name}.lora_B.weight"].float()
        stored = f"{name.removeprefix('base_model.model.')}.weight"
        assert stored in before, stored
        before[stored] = before[stored].float() + config["lora_alpha"] / config["r"] * (b @ a)
    return max((before[name].float() - tensor.float()).abs().max().item() for name, tensor in after.items())


def prove_variants(folder: str, variants: dict[str, Any], output: str) -> None:
    quiet_transformers()
    for name, variant in variants.items():
        place = Path(folder) / name.replace(" ", "-")
        place.mkdir()
        add_result(output, name, prove_variant(place, variant))
