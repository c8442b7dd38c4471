"""What the backward pass computes again: chosen by the memory plan, for all ranks alike, and as little as fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.plan.ahead.traffic import step_traffic
from lockstep_spec.activations import kept_bytes, level_bytes
from lockstep_spec.choices import Recompute, ZeroStage
from lockstep_spec.families import shape_from_config
from lockstep_spec.fit import COPY_SHARE, after_out_of_memory, choose_recomputed, plan_memory
from lockstep_spec.memory import Place
from lockstep_spec.settings import Level, Recomputed, Settings
from lockstep_spec.training import LoraConfig
from unit.spec.test_sizes import LLAMA_8B

SHAPE = shape_from_config(LLAMA_8B)
AUTO = Settings(4096, 2, LoraConfig(16, 16, 0.0, ("q_proj", "k_proj", "v_proj", "o_proj")), ZeroStage.STAGE2)
GPU = Place(1, 1, gpu=True)
GB = 10**9


def total(recomputed: Recomputed, samples: int = 2) -> int:
    return plan_memory(SHAPE, replace(AUTO, chosen=recomputed, micro_batch_size=samples), GPU, 1).total_bytes


def chosen(*needs: tuple[int, int], settings: Settings = AUTO) -> Recomputed:
    return choose_recomputed(SHAPE, settings, GPU, needs)[0].recomputed


def test_a_level_keeps_what_it_says_of_each_token() -> None:
    """Input; attention's output and 4 bytes a head; queries, keys and values, attention's last matrix, gate and factor, the last matrix,
    what the adapter has between its two.
    """
    of_level = {level: level_bytes(SHAPE, AUTO, level) // 8192 for level in Level}
    assert of_level[Level.ALL] == 2 * 4096
    assert of_level[Level.ATTENTION] == 2 * 4096 + 2 * 4096 + 4 * 32
    assert of_level[Level.NORMS] == of_level[Level.ATTENTION] + 2 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096 + 4 * 16)
    assert of_level[Level.NONE] > of_level[Level.NORMS]


def test_the_first_layers_are_at_a_level_and_the_others_one_lower() -> None:
    mixed = Recomputed(Level.ATTENTION, 5)
    assert [mixed.of(layer) for layer in (0, 4, 5, 31)] == [Level.ATTENTION, Level.ATTENTION, Level.NORMS, Level.NORMS]
    kept = 5 * level_bytes(SHAPE, AUTO, Level.ATTENTION) + 27 * level_bytes(SHAPE, AUTO, Level.NORMS)
    assert kept_bytes(SHAPE, replace(AUTO, chosen=mixed)) == kept
    assert [mixed.share(level, 32) for level in (Level.NORMS, Level.ATTENTION, Level.ALL)] == [1.0, 5 / 32, 0.0]
    assert mixed.words(32) == "all but attention's output in 5 of 32 layers and norms and gates in 27 of 32 layers"
    assert (Recomputed(Level.NONE).words(32), Recomputed(Level.ALL).words(32)) == ("nothing", "everything in all layers")


@pytest.mark.parametrize(
    "step",
    [
        Recomputed(Level.NONE),
        Recomputed(Level.NORMS, 1),
        Recomputed(Level.NORMS, 20),
        Recomputed(Level.ATTENTION, 9),
        Recomputed(Level.ALL, 31),
    ],
)
def test_auto_takes_the_first_step_that_leaves_a_reserve(step: Recomputed) -> None:
    assert chosen((2, round(total(step) / COPY_SHARE) + 2)) == step
    assert chosen((2, round(total(step) / COPY_SHARE) - 2)) != step


def test_all_ranks_take_the_choice_of_the_one_with_the_least_room() -> None:
    assert chosen((2, 141 * GB)).level is Level.NONE
    assert chosen((2, 141 * GB), (2, 40 * GB)) == chosen((2, 40 * GB)) != chosen((1, 40 * GB))


def test_auto_takes_all_where_nothing_leaves_a_reserve_and_says_why() -> None:
    settings, why = choose_recomputed(SHAPE, AUTO, GPU, [(2, 20 * GB)])
    assert (settings.recomputed, why) == (Recomputed(Level.ALL), "since memory is short")


@pytest.mark.parametrize(
    ("known", "place", "needs", "unknown", "why"),
    [
        (False, GPU, [(2, 141 * GB)], "", "there is no memory plan"),
        (True, GPU, [], "", "there is no memory plan"),
        (True, replace(GPU, shared=True), [(2, 141 * GB)], "", "the GPU's memory is the machine's"),
        (True, GPU, [(2, 141 * GB)], "another process holds memory of a GPU", "another process holds memory of a GPU"),
    ],
)
def test_auto_takes_all_where_it_can_not_count_on_the_plan(
    known: bool, place: Place, needs: list[tuple[int, int]], unknown: str, why: str
) -> None:
    settings, reason = choose_recomputed(SHAPE if known else None, AUTO, place, needs, unknown)
    assert (settings.recomputed, reason) == (Recomputed(Level.ALL), f"because {why}")


def test_auto_takes_all_where_activations_have_not_been_measured() -> None:
    settings, reason = choose_recomputed(replace(SHAPE, unmeasured="newest"), AUTO, GPU, [(2, 141 * GB)])
    assert settings.recomputed == Recomputed(Level.ALL)
    assert reason == "because the activations of model_type newest have not been measured"


@pytest.mark.parametrize(("asked", "level"), [(Recompute.NONE, Level.NONE), (Recompute.ALL, Level.ALL)])
def test_what_is_asked_for_is_done_whatever_the_memory(asked: Recompute, level: Level) -> None:
    settings, why = choose_recomputed(SHAPE, replace(AUTO, recompute=asked), GPU, [(2, 40 * GB)])
    assert (settings.recomputed, why) == (Recomputed(level), "")


def test_only_layers_of_which_something_is_computed_again_gather_their_weights_a_third_time() -> None:
    sharded, place = replace(AUTO, zero_stage=ZeroStage.STAGE3), Place(2, 1, gpu=True)
    gathered = [
        step_traffic(SHAPE, replace(sharded, chosen=step), place, 1)[0].node_bytes
        for step in (Recomputed(Level.NONE), Recomputed(Level.NORMS, 16))
    ]
    assert gathered[1] / gathered[0] == pytest.approx(2.5 / 2)


def test_a_device_that_ran_out_of_memory_is_told_to_compute_everything_again_unless_it_does() -> None:
    for step, advised in ((Recomputed(Level.NORMS, 3), True), (Recomputed(Level.ALL), False)):
        advice = after_out_of_memory(plan_memory(SHAPE, replace(AUTO, chosen=step), GPU, 60 * GB))[-1]
        assert ("optimization.recompute: All (saves about" in advice) is advised
