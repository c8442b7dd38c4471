"""The memory plan: what is counted, when a run is refused, and what is advised."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep_spec.activations import kept_bytes, layer_bytes
from lockstep_spec.choices import Batches, Content, HierarchicalPartition, Method, Offload, Precision, Quantization, Recompute, ZeroStage
from lockstep_spec.fit import COPY_SHARE, MemoryPlan, after_out_of_memory, choose_partition, most_samples, plan_memory, relief
from lockstep_spec.memory import Place, base_bytes, bucket_bytes, estimate, gathered_elements, trained_elements
from lockstep_spec.settings import size_settings
from lockstep_spec.shape import ModelShape, Weight, shape_of
from lockstep_spec.training import CheckpointConfig, DataConfig, LoraConfig, ModelConfig, OptimizationConfig, TrainingConfig
from lockstep_train.checkpoint.save.snapshot import HostMemory, lay_out
from lockstep_train.memory.capacity import MemoryNeed, host_bytes, own_bytes, shortage
from lockstep_train.zero.zero_access import Fragment

GB = 1_000_000_000
TRAINING = TrainingConfig(
    model=ModelConfig("/models/base"),
    lora=LoraConfig(rank=16, alpha=32, dropout=0.0, target_modules=("q_proj", "k_proj", "v_proj", "o_proj")),
    zero_stage=ZeroStage.STAGE2,
    precision=Precision.BF16,
    seed=1,
    data=DataConfig(max_length=4096, path="/data"),
    optimization=OptimizationConfig(epochs=1, learning_rate=1e-4, micro_batch_size=2, recompute=Recompute.NONE),
    evaluation=None,
    checkpoint=CheckpointConfig(every_steps=10, keep=2, resume_from="Auto"),
)
GPU = Place(world_size=16, ranks_per_node=8, gpu=True)
GLM_AIR = SimpleNamespace(
    hidden_size=4096, intermediate_size=10944, num_hidden_layers=46, num_attention_heads=96, num_key_value_heads=8, head_dim=128,
    vocab_size=151552, num_experts_per_tok=8, moe_intermediate_size=1408, n_shared_experts=1,
)  # fmt: skip


def llama_8b() -> ModelShape:
    config = SimpleNamespace(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256
    )
    shapes = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096)}
    weights = [Weight("model.embed_tokens.weight", (128256, 4096)), Weight("lm_head.weight", (128256, 4096), linear=True)]
    for layer in range(32):
        prefix = f"model.layers.{layer}"
        weights += [Weight(f"{prefix}.self_attn.{name}_proj.weight", shape, linear=True) for name, shape in shapes.items()]
        weights += [Weight(f"{prefix}.mlp.{name}_proj.weight", (14336, 4096), linear=True) for name in ("gate", "up")]
        weights += [Weight(f"{prefix}.mlp.down_proj.weight", (4096, 14336), linear=True)]
    return shape_of(config, tuple(weights))


def glm_air() -> ModelShape:
    """GLM-4.5-Air's attention and experts."""
    weights = []
    for layer in range(46):
        prefix = f"model.layers.{layer}"
        weights += [Weight(f"{prefix}.self_attn.{name}_proj.weight", (96 * 128, 4096), linear=True) for name in "q"]
        weights += [Weight(f"{prefix}.self_attn.{name}_proj.weight", (8 * 128, 4096), linear=True) for name in "kv"]
        weights += [Weight(f"{prefix}.self_attn.o_proj.weight", (4096, 96 * 128), linear=True)]
        if layer:
            weights += [
                Weight(f"{prefix}.mlp.experts.gate_up_proj", (128, 2816, 4096)),
                Weight(f"{prefix}.mlp.experts.down_proj", (128, 4096, 1408)),
            ]
    return shape_of(GLM_AIR, tuple(weights))


def changed(base: Any = TRAINING, **sections: Any) -> TrainingConfig:
    """`changed(data={"max_length": 5}, precision=…)`"""
    return replace(
        base, **{key: replace(getattr(base, key), **value) if isinstance(value, dict) else value for key, value in sections.items()}
    )


def sizes(training: TrainingConfig, place: Place = GPU, shape: ModelShape | None = None) -> dict[str, int]:
    return {item.name.split(" / ")[0]: item.size_bytes for item in estimate(shape or llama_8b(), size_settings(training), place)}


def plan(capacity: float, place: Place = GPU, shape: ModelShape | None = None, training: TrainingConfig = TRAINING) -> MemoryPlan:
    return plan_memory(shape or llama_8b(), size_settings(training), place, int(capacity * GB))


def test_an_adapter_has_the_published_number_of_parameters() -> None:
    linear = changed(lora={"target_modules": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")})
    assert trained_elements(llama_8b(), size_settings(linear)) == 41_943_040
    assert trained_elements(glm_air(), size_settings(TRAINING)) == 31_653_888


def test_experts_in_a_stack_each_get_an_adapter() -> None:
    experts = changed(lora={"target_modules": (), "target_parameters": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")})
    assert trained_elements(glm_air(), size_settings(experts)) == 45 * 128 * 16 * (2816 + 4096 + 4096 + 1408)
    assert trained_elements(llama_8b(), size_settings(changed(method=Method.FULL))) == llama_8b().numel


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    [(ZeroStage.STAGE1, 1, 1, 16), (ZeroStage.STAGE2, 1, 16, 16), (ZeroStage.STAGE3, 16, 16, 16)],
)
def test_each_stage_shards_one_thing_more(stage: ZeroStage, weights: int, gradients: int, optimizer: int) -> None:
    found, trained = sizes(changed(zero_stage=stage)), trained_elements(llama_8b(), size_settings(TRAINING))
    assert found["weights"] == llama_8b().numel * 2 // weights
    assert found["gradients"] == trained * 4 // gradients
    assert found["FP32 masters and moments"] == trained * 12 // optimizer


def test_gradients_that_are_summed_in_bf16_take_two_bytes() -> None:
    chosen = replace(TRAINING, deepspeed={"data_types": {"grad_accum_dtype": "bf16"}})
    assert 2 * sizes(chosen)["gradients"] == sizes(TRAINING)["gradients"]


@pytest.mark.parametrize(("method", "elements"), [(Method.LORA, None), (Method.FULL, 500_000_000)])
def test_gradients_are_reduced_in_a_bucket_of_their_size_and_of_deepspeeds_default_at_most(method: Method, elements: int | None) -> None:
    trained = trained_elements(llama_8b(), size_settings(TRAINING))
    found = sizes(changed(method=method, zero_stage=ZeroStage.STAGE3))
    assert found["bucket of gradients that are reduced"] == 2 * (elements or trained)


def test_the_second_copy_of_a_node_is_shared_by_its_ranks() -> None:
    found = sizes(changed(zero_stage=ZeroStage.STAGE3), replace(GPU, partition=8))
    assert found["second copy"] == 2 * found["weights"]


def test_offloading_takes_masters_and_moments_from_the_device() -> None:
    assert "FP32 masters and moments" not in sizes(changed(optimization={"offload": Offload.CPU}))


def test_a_saves_copy_takes_memory_of_a_rank_on_cpus_and_none_of_a_gpus() -> None:
    cpu, trained = replace(GPU, gpu=False), trained_elements(llama_8b(), size_settings(TRAINING))
    assert sizes(TRAINING, cpu)["a save's copy"] == trained * 12 // 16
    assert sizes(changed(checkpoint={"content": Content.LITE}), cpu)["a save's copy"] == trained * 2 // 16
    assert "a save's copy" not in sizes(TRAINING)


def test_a_smaller_copy_is_advised_where_it_saves_memory() -> None:
    full = changed(method=Method.FULL)
    told = {gpu: [line for line in relief(plan(80.0, replace(GPU, gpu=gpu), training=full)) if "Lite" in line] for gpu in (False, True)}
    assert told == {False: ["checkpoint.content: Lite (saves about 5.0 GB)"], True: []}  # 8.03 billion × (12 - 2) bytes / 16 ranks


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        ([MemoryNeed(0, 10 * GB, 4 * GB, GB), MemoryNeed(0, 10 * GB, 4 * GB, GB)], None),
        ([MemoryNeed(0, 99 * GB, 4 * GB, GB), MemoryNeed(1, 10 * GB, 6 * GB, 3 * GB), MemoryNeed(1, 9 * GB, GB, 2 * GB)],
            "node 1 has 9.0 GB of host memory, of which its 2 ranks hold 7.0 GB, and the copies that saves are written from need 5.0 GB"
            " more; raise "),
        ([MemoryNeed(0, None, 4 * GB, GB)], None),
    ],
)  # fmt: skip
def test_copies_that_have_no_room_beside_what_a_node_holds_are_told_in_numbers(needs: list[MemoryNeed], expected: str | None) -> None:
    said = shortage(needs)
    assert said is None if expected is None else said is not None and said.startswith(expected)


def test_the_memory_of_a_process_is_what_no_file_can_give_back(tmp_path: Path) -> None:
    rollup = write(tmp_path, {"rollup": "Rss:  9000 kB\nPss_Anon:  1000 kB\nPss_File:  500 kB\n"}) / "rollup"
    assert (own_bytes(rollup), own_bytes(tmp_path / "none")) == (1_024_000, 0)
    assert own_bytes() > 0


def test_the_memory_of_saves_is_taken_whole_and_once() -> None:
    def taken() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssShmem:"))

    image = lay_out([Fragment("w", (1 << 23,), 0, 1 << 23, {"fp32": torch.zeros(1 << 23)})])
    memory, before = HostMemory(), taken()
    buffer = memory.reserve(image)
    assert taken() - before >= image.size, "pages that nobody touched are no memory"
    assert memory.begin(image).buffer is buffer


def test_quantizing_spares_what_is_no_linear_layer_and_the_head() -> None:
    spared = 2 * 128256 * 4096
    quarter = base_bytes(llama_8b(), size_settings(changed(model={"quantization": Quantization.NF4})))
    assert quarter == pytest.approx(spared * 2 + (llama_8b().numel - spared) * 0.516, abs=1)


def test_a_layer_that_is_not_computed_again_keeps_what_its_operations_need_again() -> None:
    """Queries, keys, values and attention's output, its input for the adapters, what these reduce it to; outputs of documents put together,
    for the adapter on the next layer; the gate and two more; two norms in FP32.
    """
    per_token = 2 * (2 * 4096 + 2 * 1024 + 4096 + 4 * 16 + 4096) + 2 * 3 * 14336 + 4 * 2 * 4096
    assert kept_bytes(llama_8b(), size_settings(TRAINING)) == 8192 * 32 * per_token
    checkpointed = size_settings(changed(optimization={"recompute": Recompute.ALL}))
    assert kept_bytes(llama_8b(), checkpointed) == 8192 * 32 * 2 * 4096
    assert layer_bytes(llama_8b(), checkpointed) == 8192 * per_token
    dropping = size_settings(replace(TRAINING, lora=replace(TRAINING.lora, dropout=0.1)))
    assert layer_bytes(llama_8b(), dropping) == 8192 * (per_token + 4 * 4096 * 3), (
        "each adapter's own input, and a mask of a byte an element"
    )


@pytest.mark.parametrize(
    ("change", "more"),
    [
        ({"zero_stage": ZeroStage.STAGE3}, 2 * (4096 + 14336)),  # inputs of the feed-forward part's three linear layers
        ({"lora": {"target_modules": ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj")}}, 2 * (4096 + 16)),
        ({"method": Method.FULL}, 2 * (4096 + 14336 + 2 * 4096 - 4 * 16)),  # and what the norms' weights are multiplied with; no adapter
        ({"optimization": {"batches": Batches.ROWS}}, -2 * 4096),  # outputs of attention that needn't be put together
    ],
)
def test_more_is_kept_where_inputs_are_needed_again(change: dict[str, Any], more: int) -> None:
    before = layer_bytes(llama_8b(), size_settings(TRAINING))
    assert layer_bytes(llama_8b(), size_settings(changed(**change))) - before == 8192 * more


def test_logits_are_counted_whole_where_the_loss_needs_them_whole() -> None:
    """Gemma-2-9B at 8,192 tokens: 256,000 words, 12 bytes each and 2 for what caps them."""
    capped = replace(llama_8b(), vocabulary=256_000, caps_logits=True)
    whole = "whole logits of 8192 tokens, which this model's loss needs"
    assert sizes(TRAINING, shape=capped)[whole] == 14 * 8192 * 256_000
    assert "tile of logits" in sizes(changed(data={"max_length": 512}))
    adapter = changed(lora={"target_modules": ("q_proj", "lm_head")})
    assert sizes(adapter)[whole] == 12 * 8192 * 128_256


def test_joined_rows_need_no_mask_whatever_is_in_them() -> None:
    assert sizes(changed(data={"packing": True})) == sizes(TRAINING)
    assert not any("mask" in name for name in sizes(TRAINING))


def test_a_gpu_holds_more_than_tensors() -> None:
    found = sizes(TRAINING)
    assert found["NCCL's buffers of 2 communicators"] == 2 * 2 * 32 * 4 * 1024 * 1024
    tensors = sum(
        size for name, size in found.items() if name not in ("CUDA", "NCCL's buffers of 2 communicators", "reserve for fragmentation")
    )
    assert found["reserve for fragmentation"] == pytest.approx(tensors * 0.06, abs=1)
    hierarchical = sizes(changed(zero_stage=ZeroStage.STAGE3), replace(GPU, partition=8))
    assert "NCCL's buffers of 3 communicators" in hierarchical
    alone = sizes(TRAINING, Place(1, 1, gpu=True))
    assert not any("NCCL" in name for name in alone)
    assert {"CUDA", "reserve for fragmentation"}.isdisjoint(sizes(TRAINING, replace(GPU, gpu=False)))


def test_the_update_is_the_worst_moment_where_activations_are_few() -> None:
    short = changed(method=Method.FULL, data={"max_length": 16}, optimization={"recompute": Recompute.ALL})
    assert sizes(short, Place(2, 2, gpu=True))["the update's temporaries"] == 12 * llama_8b().numel // 2


def test_a_run_is_refused_with_the_single_settings_that_would_fit() -> None:
    refused = plan(31.0).refusal()
    assert "63.8 GB on each GPU, which has 31.0 GB" in refused
    assert refused.endswith("what would fit: optimization.recompute: All; or data.maxLength: 512")
    assert not plan(31.0, training=changed(optimization={"recompute": Recompute.ALL})).tight


def test_settings_are_joined_when_none_is_enough_alone() -> None:
    refused = plan(8.0, training=changed(data={"max_length": 16384})).refusal()
    assert refused.endswith(
        "optimization.recompute: All with optimization.microBatchSize: 1 with zeroStage: Stage3 with data.maxLength: 2048"
    )


def test_a_model_that_no_setting_fits_is_told_so() -> None:
    refused = plan(1.0, Place(1, 1, gpu=True)).refusal()
    assert "more or larger GPUs" in refused and "resources.limits.memory" not in refused


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_on_cpus_are_told_how_much_memory_would_do(ranks: int) -> None:
    place = Place(ranks, ranks, gpu=False)
    small = plan(1.0, place)
    refused = small.refusal()
    assert refused is not None and "GPU" not in refused
    stated = re.search(r"at least (\d+)Gi of memory for the .* of a node \(spec.resources.memory", refused)
    enough = int(stated[1]) * 2**30 // ranks
    assert not plan(enough / 1e9, place).tight and plan((enough - 2**30) / 1e9, place).tight


@pytest.mark.parametrize(("gpu", "inputs", "advised"), [(True, 4095, True), (False, 4096, True), (False, 4095, False)])
def test_nf4_is_advised_only_where_it_would_not_be_refused(gpu: bool, inputs: int, advised: bool) -> None:
    shape = llama_8b()
    shape = replace(shape, weights=(*shape.weights, Weight("model.layers.0.odd.weight", (8, inputs), linear=True)))
    assert any("NF4" in line for line in relief(plan(10.0, replace(GPU, gpu=gpu), shape))) is advised


def test_what_may_run_is_never_refused_but_called_tight() -> None:
    roomy = plan(1000.0)
    at_most = replace(roomy, capacity_bytes=roomy.total_bytes)
    tight = replace(roomy, capacity_bytes=roomy.total_bytes - 1)
    least = replace(roomy, capacity_bytes=int(roomy.least_bytes) + 1)
    assert [found.refusal() is None for found in (at_most, tight, least)] == [True, True, True]
    assert [any("may run out" in line for line in found.lines()) for found in (at_most, tight, least)] == [False, True, True]
    assert replace(roomy, capacity_bytes=int(roomy.least_bytes) - 1).refusal() is not None


def test_weights_that_a_lone_cpu_rank_maps_from_the_file_are_not_certainly_needed() -> None:
    certain = {
        (ranks, gpu): next(item for item in plan(9.0, Place(ranks, 1, gpu)).items if item.name == "weights").certain
        for ranks in (1, 2)
        for gpu in (False, True)
    }
    assert certain == {(1, False): False, (1, True): True, (2, False): True, (2, True): True}


def test_the_lines_name_every_item_and_the_total() -> None:
    lines = plan(80.0).lines()
    assert lines[0].startswith("Memory plan per GPU: about ")
    assert lines[0].endswith(" of 80.0 GB")
    assert any("weights" in line and "16.1 GB" in line for line in lines)


def test_activations_of_an_architecture_that_was_not_measured_are_told_to_be_of_another() -> None:
    told = "estimated for another architecture: those of model_type newest have not been measured"
    unmeasured = replace(llama_8b(), unmeasured="newest")
    assert f"  Activations are {told}" in plan(80.0, shape=unmeasured).lines()
    refused = plan(7.0, shape=unmeasured).refusal()
    assert refused is not None and f"; activations are {told}); what would fit: " in refused
    assert not any("another architecture" in text for text in (*plan(80.0).lines(), plan(7.0).refusal() or ""))


def test_layers_are_found_by_whatever_name_they_have() -> None:
    """GPT-2's are transformer.h.0, OPT's model.decoder.layers.0."""
    weights = (
        Weight("wte.weight", (50, 8)),
        Weight("transformer.h.0.mlp.c_fc.weight", (8, 32)),
        Weight("transformer.h.0.ln_1.weight", (8,)),
    )
    gpt2 = shape_of(SimpleNamespace(hidden_size=8, num_attention_heads=2), weights)
    assert (gpt2.largest_module, gpt2.layer_norms, gpt2.intermediate, gpt2.factors) == (256, 1, 32, 1)


def test_advice_after_running_out_of_memory_says_what_each_setting_saves() -> None:
    last = after_out_of_memory(plan(80.0))[-1]
    assert last.startswith("What would lower it: optimization.recompute: All (saves about ")


@pytest.mark.parametrize(
    ("changes", "place", "capacity", "expected"),
    [
        ({}, GPU, 141, 8),
        ({}, GPU, 40, 1),  # no room for another 27 GB
        ({}, replace(GPU, gpu=False), 141, 1),
        ({"hierarchical_partition": HierarchicalPartition.NODE}, replace(GPU, gpu=False), 141, 8),
        ({"hierarchical_partition": HierarchicalPartition.NODE}, GPU, 10, 8),
        ({"hierarchical_partition": HierarchicalPartition.NONE}, GPU, 141, 1),
        ({"zero_stage": ZeroStage.STAGE2}, GPU, 141, 1),
        ({}, replace(GPU, ranks_per_node=16), 141, 1),
        ({"hierarchical_partition": HierarchicalPartition.NODE}, replace(GPU, ranks_per_node=1), 141, 1),
    ],
)
def test_a_second_copy_is_kept_where_it_helps_and_fits(changes: dict[str, Any], place: Place, capacity: int, expected: int) -> None:
    training = changed(**{"zero_stage": ZeroStage.STAGE3, "optimization": {"recompute": Recompute.ALL}, **changes})
    assert choose_partition(glm_air(), size_settings(training), place, capacity * GB) == expected


@pytest.mark.parametrize(("share", "expected"), [(0.84, 8), (0.86, 1), (0.99, 1)])
def test_a_second_copy_that_nobody_asked_for_leaves_a_reserve(share: float, expected: int) -> None:
    training = changed(zero_stage=ZeroStage.STAGE3, optimization={"recompute": Recompute.ALL})
    with_copy = plan(1.0, replace(GPU, partition=8), glm_air(), training).total_bytes
    assert choose_partition(glm_air(), size_settings(training), GPU, int(with_copy / share)) == expected


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


MACHINE = {"proc/meminfo": "MemTotal:       16000000 kB\nMemFree: 1 kB\n"}
V1 = {**MACHINE, "proc/self/cgroup": "5:cpu,memory:/kube/pod\n0::/\n"}
V2 = {**MACHINE, "proc/self/cgroup": "0::/kube/pod\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (MACHINE, 16_384_000_000),
        ({**V2, "sys/fs/cgroup/kube/pod/memory.max": "2000000000\n"}, 2_000_000_000),
        ({**V2, "sys/fs/cgroup/kube/pod/memory.max": "max\n", "sys/fs/cgroup/kube/memory.max": "3000000000\n"}, 3_000_000_000),
        ({**V2, "sys/fs/cgroup/memory.max": "4000000000\n"}, 4_000_000_000),  # in a container
        ({**V1, "sys/fs/cgroup/memory/kube/pod/memory.limit_in_bytes": "1000000000\n"}, 1_000_000_000),
        ({**V1, "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 16_384_000_000),
    ],
)
def test_the_memory_of_a_host_is_the_least_of_its_limits(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    assert host_bytes(write(tmp_path, files)) == expected


def test_stage3_may_have_two_layers_gathered_where_one_is_more_than_deepspeeds_limit_or_what_the_raw_settings_say() -> None:
    settings, shape = size_settings(changed(zero_stage=ZeroStage.STAGE3)), glm_air()
    layer = 128 * (2816 * 4096 + 4096 * 1408) + 2 * 4096 * 96 * 128 + 2 * 4096 * 8 * 128
    assert gathered_elements(shape, settings, GPU, shape.largest_module) == 2 * layer
    assert gathered_elements(llama_8b(), settings, GPU, 1000) == 1_000_000_000
    raw = {"zero_optimization": {"stage3_max_live_parameters": 0}}
    stated = size_settings(replace(changed(zero_stage=ZeroStage.STAGE3), deepspeed=raw))
    assert gathered_elements(shape, stated, GPU, shape.largest_module) == shape.largest_module


def raw(**zero: Any) -> TrainingConfig:
    return replace(changed(zero_stage=ZeroStage.STAGE3), deepspeed={"zero_optimization": zero})


@pytest.mark.parametrize(
    ("stated", "elements"), [(500_000_000, 500_000_000), (1e6, 1_000_000), ("2000", 2000), ("many", None), (None, None)]
)
def test_a_bucket_of_a_stated_size_is_counted_with_it(stated: Any, elements: int | None) -> None:
    trained = trained_elements(llama_8b(), size_settings(TRAINING))
    assert sizes(raw(reduce_bucket_size=stated))["bucket of gradients that are reduced"] == 2 * (elements or trained)
    stage2 = replace(TRAINING, deepspeed={"zero_optimization": {"reduce_bucket_size": 500_000_000}})
    assert sizes(stage2)["bucket of gradients that are reduced"] == 1_000_000_000


@pytest.mark.parametrize("zero", [{"offload_param": {"device": "cpu"}}, {"offload_param": {"device": "nvme"}}, {"cpu_offload_param": True}])
def test_weights_that_are_offloaded_take_no_memory_of_a_gpu_but_what_is_gathered(zero: dict[str, Any]) -> None:
    place = replace(GPU, partition=8)
    there, away = sizes(raw(), place), sizes(raw(**zero), place)
    assert there.keys() - away.keys() == {"weights", "second copy", "adapter"}
    assert away["gathered weights"] == there["gathered weights"] > 0


def test_a_model_that_fits_by_offloading_its_weights_is_not_refused() -> None:
    gc, alone = {"recompute": Recompute.ALL}, Place(2, 2, gpu=True)
    offloaded = changed(raw(offload_param={"device": "cpu"}), optimization=gc)
    assert plan(9.0, alone, training=changed(raw(), optimization=gc)).refusal() is not None
    assert plan(9.0, alone, training=offloaded).refusal() is None


@pytest.mark.parametrize(
    ("zero", "counted"),
    [
        ({"offload_param": {"device": "cpu"}}, True),  # a CPU rank's own memory
        ({"offload_param": {"device": "nvme"}}, False),
        ({"offload_param": {"device": "none"}}, True),
        ({"offload_param": {"device": "tape"}}, True),
        ({"offload_param": None, "cpu_offload_param": False}, True),
    ],
)
def test_weights_that_stay_in_a_ranks_memory_are_counted(zero: dict[str, Any], counted: bool) -> None:
    assert ("weights" in sizes(raw(**zero), replace(GPU, gpu=False))) is counted


@pytest.mark.parametrize(
    ("stage", "method", "each"),
    [
        (ZeroStage.STAGE1, Method.LORA, 4),
        (ZeroStage.STAGE2, Method.LORA, 2),
        (ZeroStage.STAGE1, Method.FULL, 8),
        (ZeroStage.STAGE2, Method.FULL, 4),
    ],
)
def test_the_bucket_holds_sums_under_stage1_and_is_there_twice_beside_the_backward_pass(
    stage: ZeroStage, method: Method, each: int
) -> None:
    assert bucket_bytes(size_settings(changed(zero_stage=stage, method=method))) == each


@pytest.mark.parametrize(("method", "overlap", "buckets"), [(Method.LORA, True, 2), (Method.FULL, False, 1), (Method.LORA, False, 1)])
def test_a_stated_overlap_decides_how_many_buckets_there_are(method: Method, overlap: bool, buckets: int) -> None:
    stated = replace(changed(zero_stage=ZeroStage.STAGE2, method=method), deepspeed={"zero_optimization": {"overlap_comm": overlap}})
    assert bucket_bytes(size_settings(stated)) == 2 * buckets


@pytest.mark.parametrize(("capacity", "expected"), [(9.0, 1), (63.7, 1), (63.9, 2), (249.0, 8)])
def test_a_rank_may_compute_what_its_own_device_holds_and_more_than_stated_only_with_room(capacity: float, expected: int) -> None:
    shape, settings = llama_8b(), size_settings(TRAINING)
    most = most_samples(shape, settings, GPU, round(capacity * GB))

    def total(samples: int) -> int:
        return plan_memory(shape, replace(settings, micro_batch_size=samples), GPU, 1).total_bytes

    assert most == expected
    share = 1.0 if most <= settings.micro_batch_size else COPY_SHARE
    assert most == 1 or total(most) <= share * capacity * GB
    assert total(most + 1) > COPY_SHARE * capacity * GB
