"""Rank functions of the tests that load models."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from rank_cases import CountCollectives, assembled, set_constants
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from lockstep_spec.choices import Precision
from lockstep_spec.shape import NF4_BLOCK as BLOCK
from lockstep_train import __main__ as trainer
from lockstep_train import assemble, generate
from lockstep_train.base import ranks as engine_ranks
from lockstep_train.base.errors import ConfigError, TrainerError
from lockstep_train.base.imports import import_bitsandbytes
from lockstep_train.base.runfile import rank_environment
from lockstep_train.checkpoint.save import snapshot
from lockstep_train.engine import build
from lockstep_train.memory import agree, capacity
from lockstep_train.model import load as loading
from lockstep_train.model.load import SliceLoad, reading_slices
from lockstep_train.model.weight_files import WeightReader
from lockstep_train.zero.secondary import check_secondary_shards
from lockstep_train.zero.start import prepare_deepspeed

ODD = {"vocab_size": 131, "hidden_size": 34, "intermediate_size": 66, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
ODD |= {"num_key_value_heads": 1, "initializer_range": 0.3}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 18}


def make_models(folder: str) -> None:
    """A tiny model of each family, with sizes that divide by nothing, most of them in several files."""
    families: dict[str, Any] = {
        "llama": transformers.LlamaConfig(**ODD),
        "qwen2": transformers.Qwen2Config(**{**ODD, "hidden_size": 44}, tie_word_embeddings=True),
        "qwen3_moe": transformers.Qwen3MoeConfig(**ODD, **EXPERTS, num_experts=5),
        "mixtral": transformers.MixtralConfig(**ODD, num_local_experts=5, num_experts_per_tok=2),
        "glm4_moe": transformers.Glm4MoeConfig(
            **ODD, **EXPERTS, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1
        ),
    }
    for name, config in families.items():
        torch.manual_seed(len(name))
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32 if name == "llama" else torch.bfloat16)
        for parameter, value in model.named_buffers():
            if "e_score_correction_bias" in parameter:
                value.normal_()
        model.save_pretrained(f"{folder}/{name}", max_shard_size="100GB" if name == "qwen2" else "20KB")


def joined() -> engine_ranks.Ranks:
    ranks = engine_ranks.join(rank_environment())
    prepare_deepspeed()
    return ranks


def settings(partition: int = 1) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": partition},
    }


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """This rank's true part of every parameter, and every buffer."""
    found = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        shard: Any = parameter.ds_tensor
        found[name] = shard[: max(0, min(shard.ds_numel, parameter.ds_numel - shard.ds_numel * parameter.ds_zero_partition_rank))].clone()
    return found


def compare_loads(folder: str) -> None:
    """Slices against transformers' own loader under Stage3, for every family in one group; what is cast goes through a small buffer."""
    set_constants({"model.weight_files.STAGING_BYTES": 1000})
    ranks = joined()
    for path in sorted(Path(folder).iterdir()):
        stage3 = HfDeepSpeedConfig(settings())
        theirs = loading.from_pretrained(path, Precision.BF16)
        load = SliceLoad()
        with reading_slices(load), CountCollectives() as collectives:
            ours = loading.from_pretrained(path, Precision.BF16)
        del stage3
        assert load.fallback is None, load.fallback
        assert collectives.seen == [], (path.name, collectives.seen)
        expected, found = tensors(theirs), tensors(ours)
        assert list(expected) == list(found)
        for name, value in expected.items():
            assert value.dtype == found[name].dtype, (path.name, name)
            assert torch.equal(value, found[name]), (path.name, name)
        _check_bytes(path, load.bytes_read, sum(buffer.nbytes for _, buffer in ours.named_buffers()), ranks)
    engine_ranks.leave()


def _check_bytes(path: Path, read: int, buffers: int, ranks: engine_ranks.Ranks) -> None:
    """Together the ranks read each byte once, but for the buffers, which each rank needs whole."""
    total = torch.tensor(read)
    dist.all_reduce(total)
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert int(total) <= stored + buffers * ranks.world_size, (path.name, int(total), stored)


def compare_incomplete(folder: str) -> None:
    """A tensor that is missing and one too many: the same report as transformers gives. Training would go on from numbers drawn at random,
    so that the folder is refused in every stage, on every rank alike."""
    ranks = joined()
    path = Path(folder)
    gone = "model.layers.1.mlp.up_proj.weight"
    if ranks.first:
        stored = load_file(path / "model.safetensors")
        stored["model.layers.7.gone.weight"] = stored.pop(gone)
        save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    _, expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, output_loading_info=True)
    stage3 = HfDeepSpeedConfig(settings())
    with reading_slices(SliceLoad()):
        _, found = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, output_loading_info=True)
    del stage3
    assert found == expected
    assert found["missing_keys"] == {gone}
    assert found["unexpected_keys"] == {"model.layers.7.gone.weight"}
    for stage in (1, 2, 3):
        _refused_load(path, stage, f"training.model.name {path}: its weight files lack {gone}, which its config.json asks for")
    engine_ranks.leave()


def _refused_load(folder: Path, stage: int, expected: str) -> None:
    try:
        loading.load_base(folder, Precision.BF16, {**settings(), "zero_optimization": {"stage": stage}})
    except ConfigError as error:
        assert str(error).startswith(expected), str(error)
    else:
        raise AssertionError(f"not refused in Stage{stage}: {expected}")


def refuse_renamed(folder: str) -> None:
    """Weights under names of another model. The tied lm_head, which no file holds, is not missing."""
    joined()
    path = Path(folder)
    for stage in (2, 3):
        loading.load_base(path, Precision.BF16, {**settings(), "zero_optimization": {"stage": stage}})
    renamed = {f"other.{name}": tensor for name, tensor in load_file(path / "model.safetensors").items()}
    assert "other.lm_head.weight" not in renamed
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    missing = sorted(["lm_head.weight", *(name.removeprefix("other.") for name in renamed)])
    names = f"{', '.join(missing[:8])} and {len(missing) - 8} more"
    for stage in (2, 3):
        _refused_load(path, stage, f"training.model.name {path}: its weight files lack {names}, which")
    (path / "tokenizer.json").write_text(Tokenizer(WordLevel({"a": 0}, unk_token="a")).to_str())
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    try:
        generate.load(path, None)
    except ConfigError as error:
        assert str(error).startswith(f"--model {path}: its weight files lack {names}, which"), str(error)
    else:
        raise AssertionError("generate samples from random numbers")
    engine_ranks.leave()


def compare_logits_with_secondary_shards(folder: str) -> None:
    """hpZ over two nodes of two ranks: the first forward, which reads the secondary shards alone, against a plain model."""
    joined()
    ids = torch.arange(20).view(2, 10)
    for name in ("llama", "qwen2"):
        path = Path(folder) / name
        plain = loading.from_pretrained(path, Precision.FP32)
        chosen = {**settings(partition=2), "bf16": {"enabled": False}}
        stage3 = HfDeepSpeedConfig(chosen)
        load = SliceLoad()
        with reading_slices(load):
            model = loading.from_pretrained(path, Precision.FP32)
        del stage3
        assert load.fallback is None
        trained: Any = model.requires_grad_(False).model.norm.weight.requires_grad_()  # type: ignore[union-attr]
        for parameter in model.parameters():
            sharded: Any = parameter
            assert sharded.ds_secondary_tensor is not None
            if sharded is not trained:
                sharded.ds_tensor.fill_(7.0)  # so that only the secondary shards can be right
        optimizer = torch.optim.AdamW([trained], lr=0.0)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=[trained], optimizer=optimizer, config=chosen)
        with torch.no_grad():
            found = {key: value for key, value in engine(input_ids=ids, use_cache=False).items() if key == "logits"}
            expected = plain(input_ids=ids, use_cache=False).logits
        assert torch.equal(found["logits"], expected), (name, (found["logits"] - expected).abs().max())
        engine.destroy()
        deepspeed.utils.groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    engine_ranks.leave()


def refuse_folders(folder: str) -> None:
    """Everything that is wrong with a folder names the file."""
    path = Path(folder)
    config = (path / "llama" / "config.json").read_bytes()
    broken = path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes(config)
    _refused(broken, "holds no weights")
    index = json.loads((path / "llama" / "model.safetensors.index.json").read_text())
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    first, lost, *others = sorted(set(index["weight_map"].values()))
    for name in (first, *others):
        (broken / name).write_bytes((path / "llama" / name).read_bytes())
    _refused(broken, f"lacks {lost}")
    whole = (path / "llama" / lost).read_bytes()
    for cut, reason in (
        (whole[:-1], "is cut off"),
        (whole[:5], "is cut off"),
        (b"\x05" + bytes(7) + b"[1,2]", "is not a safetensors file"),
    ):
        (broken / lost).write_bytes(cut)
        _refused(broken, f"{broken / lost} {reason}")
    (broken / "model.safetensors.index.json").write_text("{")
    _refused(broken, "is not an index of weight files")


def _refused(folder: Path, expected: str) -> None:
    try:
        loading.refuse_missing_weights(folder)
    except ConfigError as error:
        assert expected in str(error), str(error)
    else:
        raise AssertionError(f"not refused: {expected}")


def refuse_wrong_shape(folder: str) -> None:
    """Weights of another size than config.json says, on every rank alike."""
    path = Path(folder)
    ranks = joined()
    if ranks.first:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 65}))
    dist.barrier()
    try:
        loading.load_base(path, Precision.BF16, settings())
    except ConfigError as error:
        assert "model.layers.0.mlp.down_proj.weight has the shape" in str(error), str(error)
        engine_ranks.leave()
        return
    raise AssertionError("not refused")


def fall_back(folder: str) -> None:
    """Weights that are no safetensors files: loaded by transformers, and said."""
    ranks = joined()
    path = Path(folder)
    plain = loading.from_pretrained(path, Precision.BF16)
    dist.barrier()
    if ranks.first:
        torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
        (path / "model.safetensors").unlink()
    dist.barrier()
    lines: list[str] = []
    found = tensors(loading.load_base(path, Precision.BF16, settings(), say=lines.append))
    assert len(lines) == 1
    assert "because its weights are no safetensors files" in lines[0]
    shard = found["model.embed_tokens.weight"]
    size = -(-plain.model.embed_tokens.weight.numel() // ranks.world_size)  # type: ignore[union-attr]
    assert torch.equal(shard, plain.model.embed_tokens.weight.flatten()[size * ranks.rank :][:size])  # type: ignore[union-attr]
    engine_ranks.leave()


def compare_a_run_with_secondary_shards() -> None:
    """hpZ over two nodes, assembled as a run is: the check passes, and sees one wrong element of one rank's copy. The whole weights
    are fingerprinted in several chunks, most shards in one."""
    set_constants({"zero.secondary.CHUNK": 1000})
    keep_nothing_resident()
    run = assembled()
    frozen: Any = next(
        parameter for parameter in run.engine.module.parameters() if not parameter.requires_grad and not parameter.ds_persist
    )
    check_secondary_shards(run.engine.module)
    if run.ranks.rank == 3:
        assert frozen.numel() == 0, "it is resident: its copy would not be read"
        frozen.ds_secondary_tensor[0] += 1.0
    try:
        check_secondary_shards(run.engine.module)
    except TrainerError as error:
        assert "1 weights differ" in str(error), str(error)
    else:
        raise AssertionError("a wrong copy was not seen")
    engine_ranks.leave()


def fault_while_loading() -> int:
    """Train, with a volume that fails while the weights are read."""

    def unreadable(*arguments: Any) -> None:
        raise OSError(errno.EIO, "Input/output error", "/models/model-00001.safetensors")

    WeightReader.read = unreadable  # type: ignore[method-assign]
    return trainer.main([])


def in_little_memory() -> int:
    """Train where one rank has room for hardly more than the process itself."""
    agree.device_bytes = lambda device, ranks_per_node: 1 << 20 if os.environ["RANK"] == "1" else 1 << 40
    return without_loading()


def without_loading(late: bool = False) -> int:
    """Train, but for the load of the model and of the data, which fail. `late`: all ranks but the first read late what was agreed on."""
    build.load_base = None  # type: ignore[assignment]
    assemble.load_dataset = None  # type: ignore[assignment]
    if late:
        publish = engine_ranks.Ranks.publish

        def slow(ranks: engine_ranks.Ranks, key: str, value: Any = None) -> Any:
            if key == "memory/agreed" and not ranks.first:
                time.sleep(2)
            return publish(ranks, key, value)

        engine_ranks.Ranks.publish = slow  # type: ignore[method-assign]
    return trainer.main([])


def unpacked_like_packed() -> None:
    """Layers whose rows are whole blocks, at any number of rows: no weight is farther from what it was than half the widest step of its
    block's scale.
    """
    functional = import_bitsandbytes().functional
    codes = functional.get_4bit_type("nf4", device="cpu").sort().values
    step = float(codes.diff().max()) / 2
    scales_off = 2 / 127  # the scales are packed themselves, to 8 bits
    for rows, inputs in ((1, BLOCK), (7, BLOCK), (33, 3 * BLOCK), (96, 5 * BLOCK)):
        weight = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)) * torch.linspace(0.1, 3, rows)[:, None]
        packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        greatest = weight.abs().view(-1, BLOCK).amax(1)
        far = (functional.dequantize_4bit(packed, state) - weight).abs().view(-1, BLOCK).amax(1)
        assert bool((far <= step * greatest + scales_off * weight.abs().max()).all()), (rows, inputs)


def without_room_for_saves(how: str) -> int:
    """Train where one rank's node is said to have little host memory, or where a rank gets none of it."""

    def refused(size: int, pinned: bool) -> Any:
        raise MemoryError("CUDA can't pin it (error 2)")

    if os.environ["RANK"] == "1":
        if how == "limit":
            agree.device_bytes = lambda *_: None  # nothing is known of its device
            capacity.host_bytes = lambda: 1 << 20
        else:
            snapshot.HostBuffer = refused  # type: ignore[assignment,misc]
    return trainer.main([])


def keep_nothing_resident() -> None:
    """DeepSpeed keeps small parameters whole on every rank: all of these models' would be, and no shard ever be read."""
    real = build.deepspeed_settings

    def settings(*arguments: Any) -> dict[str, Any]:
        chosen = real(*arguments)
        chosen["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return chosen

    build.deepspeed_settings = settings
