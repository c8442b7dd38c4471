"""From text to the samples of a step: masks, holdout, order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_train.data import sampler
from lockstep_train.data.holdout import fixed_subset, split
from lockstep_train.data.read import Sample, jsonl_samples, paragraphs, read_samples
from lockstep_train.data.tokenize import IGNORED, Example, Tokeniser, tokenise, tokenise_blocks
from lockstep_train.errors import ConfigError

BYTES = Tokeniser(encode=lambda text: list(text.encode()), begin=(300,), end=301, pad=301)


def test_jsonl_holds_text_or_prompt_and_completion() -> None:
    samples = jsonl_samples('{"text": "a"}\n\n{"prompt": "b", "completion": "c"}\n', "x.jsonl")
    assert samples == [Sample("a", None, "x.jsonl:1"), Sample("c", "b", "x.jsonl:3")]


def test_all_broken_lines_are_counted_and_the_first_ones_named() -> None:
    with pytest.raises(ConfigError) as refused:
        jsonl_samples('{"text": ""}\n[1]\n{}\n{"text": 1}\n{\n{"prompt": "x"}\n', "x.jsonl")
    message = str(refused.value)
    assert message.startswith("6 broken lines in the data: x.jsonl:1: `text` is empty; x.jsonl:2: not a JSON object; x.jsonl:3: neither")
    assert message.endswith("(and 1 more)")


def test_plain_text_is_split_at_blank_lines() -> None:
    assert paragraphs("one\ntwo\n\n \nthree\n", "x.txt") == [Sample("one\ntwo", None, "x.txt:1"), Sample("three", None, "x.txt:5")]


def test_a_file_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"fine\n\xff\n")
    with pytest.raises(ConfigError, match=r"x\.txt:2 is not UTF-8"):
        read_samples(path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="holds no samples"):
        read_samples(tmp_path / "x.jsonl")


def test_the_prompt_and_what_the_model_expects_before_it_are_masked() -> None:
    example = tokenise([Sample("CD", "ab", "x:1")], BYTES, 64).examples[0]
    assert example.ids == (300, 97, 98, 67, 68, 301)
    assert example.labels == (IGNORED, IGNORED, IGNORED, 67, 68, 301)
    assert example.learned_tokens == 3


def test_a_long_sample_is_cut_and_counted() -> None:
    tokenised = tokenise([Sample("abcdef", None, "x:1"), Sample("a", None, "x:2")], BYTES, 4)
    assert [example.ids for example in tokenised.examples] == [(300, 97, 98, 99), (300, 97, 301)]
    assert tokenised.cut == 1


def test_a_sample_whose_prompt_fills_it_is_refused_with_its_line() -> None:
    with pytest.raises(ConfigError, match="x:9: no token to learn within"):
        tokenise([Sample("C", "abcdef", "x:9")], BYTES, 4)


@given(st.lists(st.text("ab ", min_size=1, max_size=40), min_size=1, max_size=20), st.integers(3, 30))
def test_blocks_of_plain_text_lose_no_text_and_fit(texts: list[str], max_length: int) -> None:
    plain = Tokeniser(encode=lambda text: list(text.encode()), begin=(), end=None, pad=0)
    tokenised = tokenise_blocks([Sample(text, None, "x:1") for text in texts], plain, max_length)
    joined = b"".join(bytes(example.ids) for example in tokenised.examples).replace(b"\n", b"")
    assert all(1 < len(example.ids) <= max_length for example in tokenised.examples)
    assert len("".join(texts)) - len(joined) <= len(texts)  # a last block of one token has nothing to predict


def examples(count: int) -> list[Example]:
    return [Example((index, 1), (index, 1), f"x:{index}") for index in range(count)]


def test_growing_and_shuffling_the_data_moves_no_example_between_training_and_holdout() -> None:
    small, large = examples(300), list(reversed(examples(500)))
    held_out = {example.ids for example in split(small, 0.2)[1]}
    held_out_of_large = {example.ids for example in split(large, 0.2)[1]}
    assert held_out == {ids for ids in held_out_of_large if ids[0] < 300}
    assert 30 < len(held_out) < 90


def test_duplicates_stay_on_one_side() -> None:
    training, held_out = split(examples(100) * 2, 0.3)
    assert not {example.key for example in training} & {example.key for example in held_out}
    assert len(training) + len(held_out) == 200


def test_a_holdout_too_small_for_the_data_still_holds_one_example() -> None:
    training, held_out = split(examples(5), 1e-9)
    assert (len(training), len(held_out)) == (4, 1)


def test_the_evaluated_subset_does_not_depend_on_the_order_of_the_data() -> None:
    assert fixed_subset(examples(50), 7) == fixed_subset(list(reversed(examples(50))), 7)
    assert len(fixed_subset(examples(50), 7)) == 7


def test_the_same_text_has_the_same_key_wherever_it_stands() -> None:
    first, second = (tokenise([Sample("same", None, source)], BYTES, 64).examples[0] for source in ("x:1", "y:2"))
    assert first.key == second.key


@given(st.integers(1, 60), st.integers(1, 3), st.integers(1, 25), st.integers(1, 5), st.integers(1, 4))
def test_every_sample_of_every_epoch_is_computed_exactly_once(count: int, epochs: int, size: int, world_size: int, micro: int) -> None:
    plan = sampler.plan(count=count, epochs=epochs, max_steps=None, global_batch_size=size, world_size=world_size, micro=micro)
    seen: list[int] = []
    for step in range(plan.total_steps):
        batch = sampler.global_batch(count, 1, step * size, size, plan.total_samples)
        shares = [sampler.rank_micro_batches(batch, rank, world_size, micro, plan.accumulation) for rank in range(world_size)]
        assert all(len(share) == plan.accumulation for share in shares)
        assert all(len(micro_batch) <= micro for share in shares for micro_batch in share)
        assert sorted(index for share in shares for micro_batch in share for index in micro_batch) == sorted(batch)
        seen += batch
    assert sorted(seen) == sorted(list(range(count)) * epochs)
    assert [sorted(seen[epoch * count : (epoch + 1) * count]) for epoch in range(epochs)] == [list(range(count))] * epochs


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    assert sampler.epoch_order(50, 1, 0) == sampler.epoch_order(50, 1, 0)
    assert len({sampler.epoch_order(50, seed, epoch) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_a_run_made_longer_goes_on_where_its_short_last_step_ended() -> None:
    settings = {"count": 10, "max_steps": None, "global_batch_size": 8, "world_size": 2, "micro": 2}
    first = sampler.plan(epochs=1, **settings)
    assert (first.total_steps, first.cursor(2), first.cursor(3)) == (2, 8, 10)
    longer = sampler.plan(epochs=2, **settings, done=sampler.Done(steps=2, samples=10))
    assert (longer.total_steps, longer.cursor(3), longer.cursor(4), longer.cursor(5)) == (4, 10, 18, 20)
    shorter = sampler.plan(**{**settings, "max_steps": 1}, epochs=1, done=sampler.Done(steps=2, samples=10))
    assert shorter.total_steps == 2


def test_max_steps_ends_the_run_early() -> None:
    assert sampler.plan(count=100, epochs=2, max_steps=3, global_batch_size=8, world_size=2, micro=2).total_steps == 3
    assert sampler.plan(count=10, epochs=1, max_steps=30, global_batch_size=8, world_size=2, micro=2).total_steps == 2


def test_json_samples_keep_unicode(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "naïve\u2028line"}, ensure_ascii=False), encoding="utf-8")
    assert [sample.text for sample in read_samples(tmp_path / "x.jsonl")] == ["naïve\u2028line"]
