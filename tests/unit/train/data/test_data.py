"""From a file to the sequences a run trains on: formats, broken lines, holdout, weights, samples that are too long."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep_spec.choices import DataFormat, OnBroken, Overlong, TrainOn
from lockstep_spec.training import EvaluationConfig, SamplesConfig, SourceConfig
from lockstep_train.base.errors import ConfigError
from lockstep_train.data.dataset import refuse_unknown_tokens
from lockstep_train.data.read.records import AnySample, Conversation, Sample
from lockstep_train.data.read.text_files import Broken, read_jsonl, read_text
from lockstep_train.data.tokens.encode import IGNORED
from lockstep_train.data.tokens.tokenizer import Tokenizer, padding
from unit.train.data.data_cases import BYTES, PLAIN_BYTES, dataset_of, text_of, write_jsonl


def read(path: Path) -> list[AnySample]:
    broken = Broken(path.name)
    samples = list((read_jsonl if path.suffix == ".jsonl" else read_text)(path, broken))
    broken.refuse()
    return samples


def holdout(share: float, samples: int = 100) -> EvaluationConfig:
    return EvaluationConfig(every_steps=1, holdout=share, samples=samples)


def texts(sequences: Any) -> list[str]:
    return [text_of(example.ids) for example in sequences]


def test_jsonl_holds_text_or_prompt_and_completion_or_messages(tmp_path: Path) -> None:
    turn = [{"role": "user", "content": "q", "name": None}, {"role": "assistant", "content": "a"}]
    tools = [{"name": "f"}]
    path = write_jsonl(
        tmp_path / "x.jsonl",
        [
            {"text": "a"},
            {"prompt": "b", "completion": "c"},
            {"messages": turn, "tools": tools},
            {"prompt": turn[:1], "completion": turn[1:]},
        ],
    )
    clean = ({"role": "user", "content": "q"}, turn[1])
    assert read(path) == [
        Sample("a", None, 1),
        Sample("c", "b", 2),
        Conversation(clean, 0, ({"name": "f"},), 3),
        Conversation(clean, 1, (), 4),
    ]


def test_blank_lines_and_windows_line_ends_are_no_samples(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a"}\r\n\r\n \n{"text": "b"}')
    assert read(tmp_path / "x.jsonl") == [Sample("a", None, 1), Sample("b", None, 4)]


def test_all_broken_lines_are_counted_and_the_first_ones_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"text": ""}\n[1]\n{}\n{"text": 1}\n{\n{"prompt": "x"}\n{"messages": []}\n\xff\n')
    with pytest.raises(ConfigError) as refused:
        read(tmp_path / "x.jsonl")
    message = str(refused.value)
    assert message.startswith("8 broken lines in the data: x.jsonl:1: `text` is empty; x.jsonl:2: not a JSON object; x.jsonl:3: neither")
    assert message.endswith("(and 3 more); fix them, or set training.data.onBroken to Drop to leave them out")


def test_broken_lines_are_left_out_where_the_run_says_so_and_told_at_every_start(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n{\n{"text": "b"}\n{}\n')
    with pytest.raises(ConfigError, match=r"^2 broken lines in the data: "):
        dataset_of(tmp_path / "cache", path=str(path))
    for _ in range(2):
        dataset = dataset_of(tmp_path / "cache", path=str(path), on_broken=OnBroken.DROP)
        assert texts(dataset.training) == ["a", "b"]
        assert dataset.notes[1].startswith(f"WARNING: {path}: leaving out 2 broken lines: {path}:2: not valid JSON")
        assert f"{path}:4: neither `messages`" in dataset.notes[1]
    with pytest.raises(ConfigError, match=r"^2 broken lines in the data: "):
        dataset_of(tmp_path / "cache", path=str(path))


def test_data_of_broken_lines_alone_are_refused_also_where_they_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"holds no samples; WARNING: .* leaving out 1 broken lines: .*x\.jsonl:1: neither"):
        dataset_of(tmp_path / "cache", path=str(tmp_path / "x.jsonl"), on_broken=OnBroken.DROP)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([1], r"`messages\[0\]` is not an object with a `role`"),
        ([{"role": "user"}], r"`messages\[0\]` has neither a `content`"),
        ("hello", "`messages` is not a list of messages"),
    ],
)
def test_what_is_wrong_with_a_message_is_told(tmp_path: Path, messages: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"x.jsonl:1: {reason}"):
        read(write_jsonl(tmp_path / "x.jsonl", [{"messages": messages}]))


def test_plain_text_is_split_at_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("one\ntwo\n\n \nthree\n")
    assert read(tmp_path / "x.txt") == [Sample("one\ntwo", None, 1), Sample("three", None, 5)]


def test_a_file_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"fine\n\xff\n")
    with pytest.raises(ConfigError, match=r"x\.txt:2: not UTF-8"):
        read(tmp_path / "x.txt")


def test_json_samples_keep_unicode(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "naïve\u2028line"}, ensure_ascii=False), encoding="utf-8")
    assert read(tmp_path / "x.jsonl") == [Sample("naïve\u2028line", None, 1)]


@pytest.mark.parametrize("content", ["", "\n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(ConfigError, match="holds no samples"):
        dataset_of(tmp_path / "cache", path=str(tmp_path / "x.jsonl"))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.jsonl can't be read: No such file"):
        dataset_of(tmp_path / "cache", path=str(tmp_path / "gone.jsonl"))


def test_the_format_can_be_stated_where_the_name_says_nothing(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data", [{"text": "a"}])
    assert texts(dataset_of(tmp_path / "cache", path=str(path), format=DataFormat.JSONL).training) == ["a"]
    assert texts(dataset_of(tmp_path / "cache", path=str(path), format=DataFormat.TEXT).training) == ['{"text": "a"}']


@pytest.mark.parametrize("name", ["train.JSONL", "train.Json", "train.NDJSON"])
def test_the_case_of_a_name_does_not_matter(tmp_path: Path, name: str) -> None:
    assert texts(dataset_of(tmp_path / "cache", path=str(write_jsonl(tmp_path / name, [{"text": "a"}]))).training) == ["a"]


@pytest.mark.parametrize("name", ["train", "train.jsonl.txt", "train.jsonl.bak"])
@pytest.mark.parametrize("before", ["", "\n \r\n", "\ufeff"])
def test_json_lines_under_another_name_are_never_taken_for_plain_text(tmp_path: Path, name: str, before: str) -> None:
    (tmp_path / name).write_text(before + '{"text": "a"}\n', encoding="utf-8")
    with pytest.raises(
        ConfigError, match=rf"/{name} would be plain text by its name, but begins with a JSON object; set its format to JSONL"
    ):
        dataset_of(tmp_path / "cache", path=str(tmp_path / name))


@pytest.mark.parametrize("begin", ["{not json}", "[1]", '"a"', "plain", ""])
def test_plain_text_that_only_looks_like_json_is_plain_text(tmp_path: Path, begin: str) -> None:
    (tmp_path / "x.txt").write_text(f"{begin}\nmore")
    assert texts(dataset_of(tmp_path / "cache", path=str(tmp_path / "x.txt")).training) == [f"{begin}\nmore".lstrip()]


def test_the_prompt_and_what_the_model_expects_before_it_are_masked(tmp_path: Path) -> None:
    path = str(write_jsonl(tmp_path / "x.jsonl", [{"prompt": "ab", "completion": "CD"}]))
    example = dataset_of(tmp_path / "cache", path=path).training[0]
    assert example.ids.tolist() == [300, 97, 98, 67, 68, 301]
    assert example.labels.tolist() == [IGNORED, IGNORED, IGNORED, 67, 68, 301]
    assert (example.learned_tokens, example.source) == (3, f"{path}:1")
    everything = dataset_of(tmp_path / "cache", path=path, train_on=TrainOn.ALL).training
    assert everything[0].labels.tolist() == [IGNORED, 97, 98, 67, 68, 301]
    assert everything.learned_tokens([0]) == everything[0].learned_tokens == 5


def test_a_token_that_the_model_has_no_row_for_is_refused_by_its_text(tmp_path: Path) -> None:
    def refused(records: list[dict[str, str]], tokenizer: Tokenizer, rows: int | None) -> bool:
        found = dataclasses.replace(tokenizer, vocabulary=rows, decode=text_of)
        dataset = dataset_of(tmp_path / "cache", found, path=str(write_jsonl(tmp_path / "x.jsonl", records)))
        try:
            refuse_unknown_tokens(dataset, found)
        except ConfigError as error:
            assert str(error).startswith(
                f"the tokenizer gives the token {rows} ({text_of([rows])!r}), but the model has only those below {rows} "
            )
            return True
        return False

    letters = [{"prompt": "a", "completion": "z"}, {"text": "bc"}]
    assert [refused(letters, PLAIN_BYTES, rows) for rows in (None, ord("z") + 1, ord("z"))] == [False, False, True]
    prompted = [{"prompt": "z", "completion": "a"}, {"text": "bc"}]
    assert [refused(prompted, PLAIN_BYTES, rows) for rows in (ord("z") + 1, ord("z"))] == [False, True]
    beginning = dataclasses.replace(PLAIN_BYTES, begin=(300,), digest="begins")
    assert [refused(letters, beginning, rows) for rows in (301, 300)] == [False, True]
    assert [refused(letters, BYTES, rows) for rows in (302, 301)] == [False, True]


@pytest.mark.parametrize(
    ("pad", "end", "rows", "used"), [(5, 2, 6, 5), (5, 2, 5, 2), (None, 2, 5, 2), (5, 5, 5, 0), (5, None, None, 5), (None, None, 5, 0)]
)
def test_rows_are_filled_up_with_a_token_that_the_model_has(pad: int | None, end: int | None, rows: int | None, used: int) -> None:
    assert padding(pad, end, rows) == used


LONG = [{"text": "abcdefghij"}, {"text": "short"}, {"prompt": "0123456", "completion": "xyz"}]


def test_a_long_sample_is_cut_and_counted(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "cache", path=str(write_jsonl(tmp_path / "x.jsonl", LONG)), max_length=10)
    assert [example.ids.tolist() for example in dataset.training] == [[300, *b"abcdefghi"], [300, *b"short", 301], [300, *b"0123456xy"]]
    assert "3 samples to train on, 2 longer than maxLength = 10 tokens, cut at their end" in dataset.notes[0]


def test_long_samples_can_be_dropped(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "cache", path=str(write_jsonl(tmp_path / "x.jsonl", LONG)), max_length=10, overlong=Overlong.DROP)
    assert texts(dataset.training) == ["short"]
    assert "3 samples to train on, 1 documents, 2 longer than maxLength = 10 tokens, dropped" in dataset.notes[0]


def test_a_long_sample_can_be_an_error_that_names_the_first_one(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "short"}, *LONG])
    with pytest.raises(ConfigError, match=r"2 samples are longer than training.data.maxLength = 10 tokens, the first at .*x.jsonl:2;"):
        dataset_of(tmp_path / "cache", path=str(path), max_length=10, overlong=Overlong.ERROR)


def test_split_pieces_keep_every_token_and_mask_and_begin_anew(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "cache", path=str(write_jsonl(tmp_path / "x.jsonl", LONG)), max_length=6, overlong=Overlong.SPLIT)
    assert [example.ids.tolist() for example in dataset.training] == [
        [300, *b"abcde"], [300, *b"fghij"], [300, 301], [300, *b"short"], [300, 301], [300, *b"56xyz"], [300, 301],
    ]  # fmt: skip
    assert dataset.training[5].labels.tolist() == [IGNORED, IGNORED, IGNORED, *b"xyz"]
    assert sum(example.learned_tokens for example in dataset.training) == 11 + 6 + 4
    assert [example.learned_tokens for example in dataset.training] == [dataset.training.learned_tokens([index]) for index in range(7)]
    assert "3 longer than maxLength = 6 tokens, split, 1 pieces left out in which nothing is learned" in dataset.notes[0]


def test_a_sample_whose_prompt_fills_it_is_refused_with_its_line(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "a"}, {"prompt": "abcdef", "completion": "C"}])
    with pytest.raises(ConfigError, match=r"x.jsonl:2: no token to learn within training.data.maxLength = 4 \(1 such samples\)"):
        dataset_of(tmp_path / "cache", path=str(path), max_length=4)


def test_a_length_that_leaves_no_room_for_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="maxLength = 1 leaves no room"):
        dataset_of(tmp_path / "cache", path=str(write_jsonl(tmp_path / "x.jsonl", LONG)), max_length=1)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text("ab", min_size=1, max_size=40), min_size=1, max_size=20), st.integers(3, 30), st.booleans())
def test_blocks_of_plain_text_lose_no_text_and_fit(
    tmp_path_factory: pytest.TempPathFactory, paragraphs: list[str], max_length: int, begins: bool
) -> None:
    folder = tmp_path_factory.mktemp("blocks")
    (folder / "x.txt").write_text("\n\n".join(["first paragraph", *paragraphs]))
    training = dataset_of(folder, BYTES if begins else PLAIN_BYTES, path=str(folder / "x.txt"), max_length=max_length).training
    assert all(1 < len(example.ids) <= max_length for example in training)
    assert all((example.ids[0] == 300) == begins for example in training)
    joined = "".join(texts(training)).replace("\n", "")
    whole = "first paragraph" + "".join(paragraphs)
    if begins:
        assert joined == whole
    else:  # a last block of one token has nothing to predict
        assert len(whole) - len(joined) <= len(paragraphs) + 1


def test_neighboring_paragraphs_share_a_block_with_the_break_between_them(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("one\n\ntwo\n\nthree")
    dataset = dataset_of(tmp_path / "cache", path=str(tmp_path / "x.txt"), max_length=11)
    assert texts(dataset.training) == ["one\n\ntwo", "three"]
    assert dataset.training[0].labels.tolist() == [IGNORED, *b"one\n\ntwo"]
    assert dataset.training[1].source.endswith("x.txt:5")


def numbered(count: int) -> list[dict[str, str]]:
    return [{"text": f"sample {number}"} for number in range(count)]


def test_growing_and_shuffling_the_data_moves_no_sample_between_training_and_holdout(tmp_path: Path) -> None:
    small = write_jsonl(tmp_path / "small.jsonl", numbered(300))
    large = write_jsonl(tmp_path / "large.jsonl", list(reversed(numbered(500))))
    held_out = set(texts(dataset_of(tmp_path / "cache", path=str(small), evaluation=holdout(0.2, 1000)).evaluation))
    held_out_of_large = set(texts(dataset_of(tmp_path / "cache", path=str(large), evaluation=holdout(0.2, 1000)).evaluation))
    assert held_out == {text for text in held_out_of_large if int(text.split()[1]) < 300}
    assert 30 < len(held_out) < 90


@pytest.mark.parametrize("overlong", [Overlong.TRUNCATE, Overlong.SPLIT])
@pytest.mark.parametrize("packing", [False, True])
def test_duplicates_stay_on_one_side_also_when_samples_are_split_and_packed(tmp_path: Path, overlong: Overlong, packing: bool) -> None:
    records = [{"text": f"{number:02} " + "x" * 30} for number in range(60)]
    doubled = [*records, *({"prompt": record["text"][:9], "completion": record["text"][9:]} for record in records)]
    path = str(write_jsonl(tmp_path / "x.jsonl", doubled))
    dataset = dataset_of(tmp_path / "c", path=path, max_length=24, overlong=overlong, packing=packing, evaluation=holdout(0.3, 1000))

    def numbers(sequences: Any) -> set[int]:
        return {
            int(text_of(example.ids[index + 1 : index + 3]))
            for example in sequences
            for index in range(len(example.ids) - 3)
            if example.ids[index + 3] == 32
        }

    training, evaluation = numbers(dataset.training), numbers(dataset.evaluation)
    assert training | evaluation == set(range(60))
    assert not training & evaluation
    assert len(evaluation) > 5


def test_a_holdout_too_small_for_the_data_still_holds_one_sample(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "cache", path=str(write_jsonl(tmp_path / "x.jsonl", numbered(5))), evaluation=holdout(1e-9))
    assert (len(dataset.training), len(dataset.evaluation)) == (4, 1)


def test_a_holdout_that_leaves_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leaves no sample to train on"):
        dataset_of(tmp_path / "cache", path=str(write_jsonl(tmp_path / "x.jsonl", numbered(1))), evaluation=holdout(1e-9))


def test_the_evaluated_subset_does_not_depend_on_the_order_of_the_data(tmp_path: Path) -> None:
    forward = write_jsonl(tmp_path / "a.jsonl", numbered(50))
    backward = write_jsonl(tmp_path / "b.jsonl", list(reversed(numbered(50))))
    subsets = [texts(dataset_of(tmp_path / "cache", path=str(path), evaluation=holdout(0.5, 7)).evaluation) for path in (forward, backward)]
    assert subsets[0] == subsets[1]
    assert len(subsets[0]) == 7


def test_evaluation_can_have_a_file_of_its_own_and_what_is_trained_on_too_is_told(tmp_path: Path) -> None:
    training = write_jsonl(tmp_path / "t.jsonl", numbered(20))
    own = write_jsonl(tmp_path / "e.jsonl", [{"text": "sample 3"}, *({"text": f"other {number}"} for number in range(9))])
    evaluation = EvaluationConfig(every_steps=1, holdout=0.02, samples=100, data=SamplesConfig(str(own)))
    dataset = dataset_of(tmp_path / "cache", path=str(training), evaluation=evaluation)
    assert len(dataset.training) == 20
    assert sorted(texts(dataset.evaluation)) == sorted(["sample 3", *(f"other {number}" for number in range(9))])
    assert dataset.notes[-1].startswith("1 of the 10 samples for evaluation are trained on as well")


@pytest.mark.parametrize(
    ("overlong", "said"),
    [
        (Overlong.TRUNCATE, "3 samples, 2 longer than maxLength = 10 tokens, cut at their end"),
        (Overlong.DROP, "3 samples, 1 documents, 2 longer than maxLength = 10 tokens, dropped"),
        (Overlong.SPLIT, "3 samples, 5 documents, 2 longer than maxLength = 10 tokens, split"),
    ],
)
def test_what_became_of_long_samples_for_evaluation_is_told_too(tmp_path: Path, overlong: Overlong, said: str) -> None:
    training = write_jsonl(tmp_path / "t.jsonl", [{"text": "short"}])
    own = write_jsonl(tmp_path / "e.jsonl", [{"text": "abcdefghij"}, {"text": "other"}, {"text": "ABCDEFGHIJ"}])
    evaluation = EvaluationConfig(every_steps=1, holdout=0.02, samples=100, data=SamplesConfig(str(own)))
    dataset = dataset_of(tmp_path / "cache", path=str(training), evaluation=evaluation, overlong=overlong, max_length=10)
    assert dataset.notes[-1] == f"Evaluation: {said}"
    assert len(dataset.evaluation) == {Overlong.TRUNCATE: 3, Overlong.DROP: 1, Overlong.SPLIT: 5}[overlong]


def test_sources_are_seen_as_often_as_their_weights_say(tmp_path: Path) -> None:
    twice = write_jsonl(tmp_path / "a.jsonl", [{"text": f"a{number}"} for number in range(6)])
    half = write_jsonl(tmp_path / "b.jsonl", [{"text": f"b{number}"} for number in range(10)])
    more = tmp_path / "c.txt"
    more.write_text("\n\n".join(f"c{number}" for number in range(4)))
    sources = (SourceConfig(str(twice), weight=2.0), SourceConfig(str(half), weight=0.5), SourceConfig(str(more), weight=1.5))
    dataset = dataset_of(tmp_path / "cache", PLAIN_BYTES, sources=sources, max_length=4)
    seen = texts(dataset.training)
    assert sorted(text for text in seen if text[0] == "a") == sorted([f"a{number}" for number in range(6)] * 2)
    halves = [text for text in seen if text[0] == "b"]
    assert len(halves) == len(set(halves)) == 5
    assert len([text for text in seen if text[0] == "c"]) == 6
    assert [note.split(": ", 2)[2] for note in dataset.notes] == [
        "6 samples to train on, weight 2: 12 an epoch",
        "10 samples to train on, weight 0.5: 5 an epoch",
        "4 samples to train on, weight 1.5: 6 an epoch",
    ]
    assert texts(dataset_of(tmp_path / "again", PLAIN_BYTES, sources=sources, max_length=4).training) == seen
