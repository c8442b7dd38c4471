"""What a plan says of memory, traffic, steps, checkpoints and time, from what is known; expected numbers are worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from golden.plan_cases import TRAINING, job, profile
from lockstep.api.errors import ConfigError
from lockstep.plan.ahead.forecast import Forecast, Pace, RunFacts, capacity, forecast, with_config
from lockstep.plan.ahead.planned import EXIT_CODES, PlanVerdict, sentence, verdict
from lockstep.plan.cluster.finding import Outcome
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults, Resolved
from lockstep.plan.render.run import trainer_config
from lockstep.platforms.jobs.planfacts import known_facts, moved_targets_here, read_pace
from lockstep_spec.families import shape_from_config
from lockstep_spec.fit import choose_recomputed
from lockstep_spec.memory import Place
from lockstep_spec.settings import Level, size_settings
from unit.spec.test_sizes import LLAMA_8B

Object = dict[str, Any]
# As in test_sizes.py: 212 elements; rank 2 on q_proj and v_proj trains 32 of them.
TINY: Object = {
    "model_type": "llama", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
SHAPE = shape_from_config(TINY)
GPUS: Object = {"platform": "Kubernetes", "image": "trainer:1", "gpus": {"perNode": 2, "type": "NVIDIA H100 80GB HBM3"}}


def resolved(profile_spec: Object | None = None, nodes: int = 2, **training: Any) -> Resolved:
    """Two nodes of two GPUs; 32 samples a step, 4 micro-batches of 2 a rank; 12 tokens a sample at most."""
    given: Object = {
        **TRAINING, "lora": {"rank": 2, "targetModules": ["q_proj", "v_proj"]}, "data": {"path": "/datasets/text.jsonl", "maxLength": 12},
        "optimization": {"microBatchSize": 2, "globalBatchSize": 32, "epochs": 3}, "checkpoint": {"everySteps": 4, "keep": 2}, **training,
    }  # fmt: skip
    return resolve(job(nodes=nodes, training=given), profile(**(GPUS | (profile_spec or {}))), PlatformDefaults(namespace="team"))


def told(found: Forecast, section: str) -> str:
    return " | ".join(f"{line.outcome.value}: {line.message}" for line in found.findings if line.subject == section)


KNOWN = RunFacts(
    shape=SHAPE, shape_source="config.json", samples=100, samples_source="--samples", capacity_bytes=80 * 10**9, capacity_source="by type"
)


def test_everything_is_counted_when_everything_is_known() -> None:
    pace = Pace(96.0, "--tokens-per-second")
    found = forecast(resolved(), RunFacts(**{**vars(KNOWN), "pace": pace}))
    assert [line.outcome for line in found.findings if line.outcome is Outcome.UNKNOWN] == []
    # 300 samples, 32 a step: 10 steps, 3.125 an epoch. A step has at most 32 × 12 = 384 tokens, 4 s at 96 tokens/s: 40 s.
    assert {key: found.figures[key] for key in ("steps", "stepsPerEpoch", "stepSeconds", "seconds")} == {
        "steps": 10, "stepsPerEpoch": 3.12, "stepSeconds": 4.0, "seconds": 40.0,
    }  # fmt: skip
    # The adapter's 64 bytes: all-reduced over 4 ranks after each of 4 micro-batches, 2 × 3/4 × 64 × 4 = 384; gathered once, 48. 432 bytes
    # in 4 s: 864 bit/s.
    assert (found.figures["stepNodeBytes"], found.figures["accumulation"]) == (432, 4)
    assert "needs less than 0.001 Gb/s" in told(found, "network")
    # Commits at steps 4, 8 and 10, of 32 × 12 = 384 bytes; kept 2 and the one being written.
    assert {key: found.figures[key] for key in ("checkpoints", "checkpointBytes", "checkpointsMostBytes")} == {
        "checkpoints": 3, "checkpointBytes": 384, "checkpointsMostBytes": 1152,
    }  # fmt: skip
    assert (found.figures["parameters"], found.figures["trainedParameters"]) == (212, 32)
    assert told(found, "time").startswith("note: at most 40s: 10 steps of 4s")


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_layers_that_peft_would_move_are_refused_also_where_the_models_sizes_are_not_known(model_type: str) -> None:
    facts = with_config(RunFacts(), {"model_type": model_type}, "its config.json")
    named: Object = {"rank": 2, "targetModules": ["o_proj", "mlp.down_proj"]}
    found = forecast(resolved(lora=named), facts)
    assert told(found, "adapter").startswith(
        f"refused: training.lora.targetModules: with a model of type {model_type}, peft puts the adapter of mlp.down_proj on all routed"
        " experts"
    )
    assert told(found, "adapter").endswith(". A run that has checkpoints goes on, with a warning")
    assert verdict(found.findings) is PlanVerdict.REFUSED
    attention: Object = {"rank": 2, "targetModules": ["q_proj", "o_proj"]}
    for fine in (resolved(lora=attention), resolved(lora=named, method="Full")):
        assert told(forecast(fine, facts), "adapter") == ""
    assert told(forecast(resolved(lora=named), with_config(RunFacts(), TINY, "its config.json")), "adapter") == ""


def test_with_measured_balance_a_gpu_is_not_at_risk_for_a_micro_batch_that_it_need_not_take() -> None:
    stated = {"microBatchSize": 4096, "globalBatchSize": 1048576}
    small = RunFacts(**{**vars(KNOWN), "capacity_bytes": 2_340_000_000})
    equal, measured = (forecast(resolved(optimization={**stated, "balance": balance}), small) for balance in ("Equal", "Measured"))

    def outcomes(estimate: Forecast) -> list[Outcome]:
        return [line.outcome for line in estimate.findings if line.subject == "memory"]

    assert equal.figures["memoryBytes"] > 2_340_000_000 >= measured.figures["memoryBytes"]
    assert [outcomes(found)[0] for found in (equal, measured)] == [Outcome.RISK, Outcome.OK]
    assert "with balance Measured the start chooses what each GPU computes" in told(measured, "memory")
    assert "balance" not in told(equal, "memory")


def test_a_measured_run_gives_its_own_tokens_a_step() -> None:
    found = forecast(resolved(), RunFacts(**{**vars(KNOWN), "pace": Pace(100.0, "a log", tokens_per_step=200.0)}))
    assert told(found, "time").startswith("note: about 20s: 10 steps of 2s (a log; its steps' tokens and speed)")


def test_what_nobody_says_is_unknown_in_every_section_and_names_what_would_say_it() -> None:
    found = forecast(resolved(), RunFacts(capacity_source="no label"))
    unknown = {line.subject: line.message for line in found.findings if line.outcome is Outcome.UNKNOWN}
    assert set(unknown) == {"memory", "network", "steps", "saves", "time"}
    assert ("--model-config" in unknown["memory"], "--samples" in unknown["steps"], "--tokens-per-second" in unknown["time"]) == (
        True,
        True,
        True,
    )


def test_a_run_that_can_not_fit_is_refused_in_the_trainers_words() -> None:
    found = forecast(resolved(), RunFacts(**{**vars(KNOWN), "capacity_bytes": 10**6}))
    assert told(found, "memory").startswith("refused: training needs about 2.3 GB on each GPU, which has 1.0 MB")


def test_a_run_that_may_run_out_is_a_risk_with_settings_that_fit() -> None:
    """Between what shapes alone need and what all estimates add up to: it isn't refused, and doesn't fit either."""
    found = forecast(resolved(), RunFacts(**{**vars(KNOWN), "capacity_bytes": 2 * 10**9}))
    line = next(line for line in found.findings if line.subject == "memory")
    assert (line.outcome, line.message) == (Outcome.RISK, "a GPU needs about 2.3 GB of 2.0 GB (by type): it may run out")
    assert line.fix.startswith("what fits: ")
    assert (verdict(found.findings), EXIT_CODES[verdict(found.findings)]) == (PlanVerdict.MAY_FAIL, 4)
    assert sentence(found.findings) == f"may fail once it runs: {line.message}"


@pytest.mark.parametrize(("gigabytes", "level"), [(141, Level.NONE), (40, Level.ATTENTION), (20, Level.ALL)])
def test_the_plan_says_what_the_trainer_will_compute_again(gigabytes: int, level: Level) -> None:
    shape = shape_from_config(LLAMA_8B)
    job_of = resolved(data={"path": "/datasets/text.jsonl", "maxLength": 4096})
    found = forecast(job_of, RunFacts(**{**vars(KNOWN), "shape": shape, "capacity_bytes": gigabytes * 10**9}))
    settings, why = choose_recomputed(
        shape, size_settings(trainer_config(job_of.training)), Place(4, 2, gpu=True), [(2, gigabytes * 10**9)]
    )
    assert settings.recomputed.level is level
    assert f"recompute Auto ({settings.recomputed.words(32)}, {why})" in told(found, "memory")
    assert any(f"recomputing {settings.recomputed.words(32)}" in name for name in found.figures["memoryItems"])


def test_samples_held_out_for_evaluation_are_not_trained_on() -> None:
    # A tenth of 100 is held out; 90 × 3 / 32 = 8.4, so 9 steps.
    found = forecast(resolved(evaluation={"holdout": "0.1"}), KNOWN)
    assert found.figures["steps"] == 9
    assert "about 9 steps, 2.812 an epoch, of 100 samples less 10 held out" in told(found, "steps")
    assert forecast(resolved(evaluation={"data": {"path": "/e.jsonl"}}), KNOWN).figures["steps"] == 10


def test_a_model_and_data_at_paths_that_can_not_be_looked_at_stay_unknown(tmp_path: Path) -> None:
    long = str(tmp_path / ("x" * 300))
    stated = resolved(model={"name": long}, data={"path": f"{long}.jsonl", "maxLength": 8})
    facts = known_facts(stated)
    assert (facts.shape, facts.samples) == (None, None)
    assert facts.shape_source.startswith(f"{long} can't be looked at (File name too long)")
    assert facts.samples_source.startswith(f"{long}.jsonl can't be looked at (File name too long)")
    assert stated.training is not None and moved_targets_here(stated.training) == ""
    with pytest.raises(ConfigError, match="can't be looked at"):
        known_facts(stated, model_config=Path(long))
    with pytest.raises(ConfigError, match="can't be looked at"):
        known_facts(stated, samples=long)


@pytest.mark.parametrize("warmup", [{"warmupSteps": 0.35}, {"warmupSteps": 4}])
def test_the_steps_of_the_warm_up_are_counted_however_they_are_stated(warmup: Object) -> None:
    found = forecast(resolved(optimization={"microBatchSize": 2, "globalBatchSize": 32, "epochs": 3, **warmup}), KNOWN)
    assert found.figures["warmupSteps"] == 4
    assert "10 steps, 4 of them to warm up, 3.125 an epoch" in told(found, "steps")
    assert "warm up" not in told(forecast(resolved(), KNOWN), "steps")


@pytest.mark.parametrize(
    ("batch", "division", "idle"),
    [
        (8, {"batches": "Rows"}, 0),
        (6, {"batches": "Rows"}, 1),
        (2, {"batches": "Rows"}, 3),
        (6, {}, 0),
        (2, {}, 2),
        (6, {"balance": "Measured"}, 0),
        (2, {"balance": "Measured"}, 2),
    ],
)
def test_ranks_that_have_no_sample_in_any_step_are_a_warning(batch: int, division: Object, idle: int) -> None:
    found = forecast(resolved(optimization={"microBatchSize": 2, "globalBatchSize": batch, "epochs": 3, **division}), KNOWN)
    words = f"warning: a step's {batch} samples are not enough for all ranks: {idle} of 4 have nothing to do in any step."
    assert told(found, "ranks").startswith(words) if idle else told(found, "ranks") == ""


def test_max_steps_end_a_run_earlier() -> None:
    limited = resolved(optimization={"microBatchSize": 2, "globalBatchSize": 32, "epochs": 3, "maxSteps": 5})
    assert forecast(limited, KNOWN).figures["steps"] == 5
    unread = forecast(limited, RunFacts(shape=SHAPE, capacity_bytes=80 * 10**9))
    assert told(unread, "steps").startswith("note: at most 5 steps (maxSteps); a step takes 32 samples")
    assert (unread.figures["checkpoints"], verdict(unread.findings)) == (forecast(limited, KNOWN).figures["checkpoints"], PlanVerdict.FITS)


def test_memory_that_is_not_known_is_a_risk_and_the_last_line_says_what_to_type() -> None:
    """Of the model or of the card; --offline changes nothing about that. A number of samples that only the data tells may be left out
    then.
    """
    no_model = forecast(resolved(), replace(KNOWN, shape=None))
    no_card = forecast(resolved(), replace(KNOWN, capacity_bytes=None, capacity_source="no label"))
    no_data = forecast(resolved(), replace(KNOWN, samples=None))
    said = "may fail once it runs; not known: "
    assert sentence(no_model.findings) == sentence(no_model.findings, offline=True) == f"{said}memory (--model-config FILE)"
    assert sentence(no_card.findings, offline=True).startswith(f"{said}memory (gpus.type in the cluster file, or spec.resources.memory")
    assert sentence(no_data.findings) == f"{said}steps (--samples N or --samples FILE)"
    assert [verdict(found.findings, offline=True) for found in (no_model, no_card, no_data)] == [
        PlanVerdict.MAY_FAIL, PlanVerdict.MAY_FAIL, PlanVerdict.FITS_AS_SEEN,
    ]  # fmt: skip


def test_a_checkpoint_that_is_larger_than_the_workspace_is_said() -> None:
    small = resolved({"storage": {"workspaceSize": "1Ki"}})  # 1152 bytes do not go into 1024
    found = forecast(small, KNOWN)
    assert "risk: the checkpoints need 1.2 kB, which is more than the cluster's workspace" in told(found, "saves")
    assert verdict(found.findings) is PlanVerdict.MAY_FAIL
    assert "more than" not in told(forecast(resolved({"storage": {"workspaceSize": "2Ki"}}), KNOWN), "saves")


def test_shards_with_a_copy_on_another_pods_volume_count_twice() -> None:
    per_pod = resolved({"storage": {"mode": "PerPod"}}, checkpoint={"everySteps": 4, "keep": 2, "replicas": 2})
    assert forecast(per_pod, KNOWN).figures["checkpointBytes"] == 768


def test_times_are_given_at_the_profiles_own_speed_where_it_has_one() -> None:
    assert "at 10 Gb/s" in told(forecast(resolved(), KNOWN), "network")
    measured = resolved({"network": {"minimumBusbw": "180"}})
    assert "a step at 1.44e+03 Gb/s, the cluster's network.minimum_busbw" in told(forecast(measured, KNOWN), "network")
    assert told(forecast(resolved(nodes=1), KNOWN), "network") == "ok: one node: nothing is sent between nodes"


def test_a_script_is_its_own_affair() -> None:
    script = resolve(job(nodes=2, script={"path": "a.py"}), profile(**GPUS), PlatformDefaults(namespace="team"))
    (line,) = forecast(script, KNOWN).findings
    assert (line.outcome, "runs its own script" in line.message) == (Outcome.NOTE, True)


def gpu_node(**labels: str) -> Object:
    return {"metadata": {"name": "a", "labels": labels}, "status": {"allocatable": {"nvidia.com/gpu": "2"}}}


def test_a_gpus_memory_is_the_smallest_label_else_what_the_profile_says() -> None:
    by_label = capacity(
        resolved(), [gpu_node(**{"nvidia.com/gpu.memory": "81559"}), gpu_node(**{"nvidia.com/gpu.memory": "40960"}), gpu_node()]
    )
    assert by_label[0] == 40960 * 2**20
    assert capacity(resolved(), [gpu_node()])[0] == 80 * 10**9
    assert capacity(resolved({"gpus": {"perNode": 2}}), ())[0] is None
    on_cpus: Object = {"gpus": {"perNode": 0}, "resources": {"limits": {"memory": "8Gi"}}}
    assert capacity(resolved(on_cpus), ())[0] == 8 * 2**30


def facts(given: Resolved | None = None, **named: Any) -> RunFacts:
    options: Object = {"model_config": None, "samples": None, "tokens_per_second": None, **named}
    return known_facts(given or resolved(), **options)


def test_a_models_folder_or_file_is_read_and_samples_are_counted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    data = tmp_path / "d.jsonl"
    data.write_text('{"text": "a"}\n\n{"text": "b"}\n{"text": "c"}')
    for path in (tmp_path, tmp_path / "config.json"):
        assert facts(model_config=path).shape == SHAPE
    assert facts(samples=str(data)).samples == 3
    assert facts(samples="7").samples == 7


@pytest.mark.parametrize("before", ["", "\n ", "\ufeff"])
def test_objects_of_an_array_are_not_counted_by_its_lines(tmp_path: Path, before: str) -> None:
    (tmp_path / "d.json").write_text(before + '[\n{"text": "a"},\n{"text": "b"}\n]', encoding="utf-8")
    counted = facts(samples=str(tmp_path / "d.json"))
    assert (counted.samples, "one JSON array" in counted.samples_source) == (None, True)


def test_paths_of_the_job_count_where_they_are_on_this_machine_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "d.jsonl").write_text("{}\n")
    here = facts(resolved(model={"name": str(tmp_path)}, data={"path": str(tmp_path / "d.jsonl")}))
    assert (here.shape, here.samples) == (SHAPE, 1)
    elsewhere = facts()
    assert (elsewhere.shape, elsewhere.samples) == (None, None)
    assert "/workspace/models/base is not on this machine" in elsewhere.shape_source


@pytest.mark.parametrize("data", [{"packing": True}, {"overlong": "Split"}])
def test_sequences_that_follow_from_tokens_are_not_counted_by_lines(tmp_path: Path, data: Object) -> None:
    given = resolved(data={"path": "/datasets/text.jsonl", **data})
    assert "depends on the tokens" in facts(given).samples_source
    with pytest.raises(ConfigError, match="--samples FILE counts lines, but"):
        facts(given, samples=str(tmp_path / "d.jsonl"))


def test_an_unknown_family_is_said_with_those_that_are_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    found = facts(model_config=tmp_path)
    assert found.shape is None
    assert "'mamba'; known here are llama" in found.shape_source


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"model_config": "none.json"}, "--model-config"),
        ({"samples": "none.jsonl"}, "--samples none.jsonl: it must be a number from 1, or a file"),
        ({"samples": "0"}, "--samples 0: it must be a number from 1"),
        ({"tokens_per_second": "none.jsonl"}, "--tokens-per-second none.jsonl: it must be a number, or a run's"),
        ({"tokens_per_second": "0"}, "more than 0"),
        ({"tokens_per_second": "nan"}, "more than 0"),
    ],
)
def test_a_file_that_is_named_and_can_not_be_used_is_an_error(tmp_path: Path, named: Object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        facts(**{key: tmp_path / value if isinstance(value, str) and key == "model_config" else value for key, value in named.items()})


def test_an_earlier_runs_pace_is_the_median_without_its_first_steps(tmp_path: Path) -> None:
    log = tmp_path / "train_log.jsonl"
    speeds = [1.0, 2.0, 100.0, 300.0, 110.0]
    log.write_text("\n".join(json.dumps({"step": step, "tokens": 50, "tokensPerSecond": speed}) for step, speed in enumerate(speeds, 1)))
    assert (read_pace(log).tokens_per_second, read_pace(log).tokens_per_step) == (110.0, 50.0)
    for broken in ("not json", "", '{"tokensPerSecond": 3}', "[]"):
        log.write_text(broken)
        with pytest.raises(ConfigError, match="--tokens-per-second"):
            read_pace(log)
