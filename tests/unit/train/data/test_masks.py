"""What of a conversation is learned, with chat templates of the kinds that models come with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import pytest

from lockstep_spec.choices import TrainOn
from lockstep_train.base.errors import ConfigError
from lockstep_train.data.read.records import Conversation, Sample
from lockstep_train.data.read.text_files import Broken
from lockstep_train.data.tokens.encode import encode_samples
from lockstep_train.data.tokens.tokenizer import Tokenizer
from lockstep_train.data.tokens.turns import ChatTemplate, Span
from unit.train.data.chat_cases import decode, encode, runs, samples, says, template

CHATML = """{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Where there was no thought an empty one is put before the answer; the thoughts of all turns but the last are left out.
QWEN_LIKE = """{%- set ns = namespace(last=0) %}{%- for message in messages %}{%- if message.role == 'user' %}\
{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and loop.index0 > ns.last %}<think>
{{ message.reasoning_content or '' }}
</think>

{% endif %}{{ message.content }}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

GLM_LIKE = """[gMASK]<sop>{%- if tools %}<|system|>
{{ tools | tojson }}{% endif %}{%- for message in messages %}<|{{ 'observation' if message.role == 'tool' else message.role }}|>
{%- if message.role == 'assistant' %}
<think>{{ message.reasoning_content or '' }}</think>
{% else %}
{% endif %}{{ message.content }}{%- endfor %}{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

# The generation prompt begins a thought, also where the answer in the data has none.
THINKING = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")

# Says how many messages are left, so that no beginning of a conversation is rendered like the whole, and asks in other words than it
# answers.
COUNTING = (
    "{% for message in messages %}({{ message.role }} {{ loop.revindex }}) {{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}(your turn) {% endif %}"
)

STOPS = ("<|im_end|>", "<|user|>", "<|observation|>")


def learned(
    source: str, messages: list[dict[str, Any]], train_on: TrainOn = TrainOn.ASSISTANT, marked: Any = None, **fields: Any
) -> list[str]:
    """The runs of text that are learned, of all samples."""
    return [run for sample in samples(template(source, STOPS, marked), messages, train_on, **fields) for run in runs(sample)]


def test_only_the_assistants_turns_are_learned_with_the_token_that_ends_them() -> None:
    messages = [{"role": "system", "content": "be brief"}, *says("one", "two", "three", "four")]
    assert learned(CHATML, messages) == ["two<|im_end|>", "four<|im_end|>"]


def test_the_last_turn_or_everything_can_be_learned_instead() -> None:
    assert learned(CHATML, says("one", "two", "three", "four"), TrainOn.LAST_TURN) == ["four<|im_end|>"]
    assert learned(CHATML, says("one", "two"), TrainOn.ALL) == ["<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"]


def test_what_the_template_has_before_every_chat_is_not_learned_with_all_the_rest() -> None:
    mine = template(GLM_LIKE, STOPS, special=["[gMASK]", "<sop>", *STOPS, "<|assistant|>"])
    (made,) = samples(mine, says("one", "two"), TrainOn.ALL)
    assert (decode(made.ids)[:13], runs(made)) == ("[gMASK]<sop><", ["<|user|>one<|assistant|><think></think>\ntwo<|user|>"])
    preface = "be brief" + CHATML
    assert runs(samples(template(preface, STOPS), says("one", "two"), TrainOn.ALL)[0])[0].startswith("be brief<|im_start|>user")


def test_messages_given_as_the_prompt_are_not_learned_whoever_speaks() -> None:
    assert learned(CHATML, says("one", "two", "three", "four"), given=3) == ["four<|im_end|>"]


@pytest.mark.parametrize("source", [QWEN_LIKE, GLM_LIKE])
def test_an_empty_thought_that_the_template_puts_in_is_not_learned(source: str) -> None:
    end = "<|im_end|>" if source is QWEN_LIKE else "<|user|>"
    assert learned(source, says("one", "two", "three", "four")) == [f"two{end}", f"four{end}"]


def test_a_thought_in_the_data_is_learned_where_the_template_keeps_it() -> None:
    messages = says("one", "two", "three", "four")
    for message in messages[1::2]:
        message["reasoning_content"] = "because"
    assert learned(GLM_LIKE, messages) == ["<think>because</think>\ntwo<|user|>", "<think>because</think>\nfour<|user|>"]


def test_an_earlier_answer_whose_thought_the_template_drops_is_a_sample_of_its_own() -> None:
    messages = says("one", "two", "three", "four")
    for message in messages[1::2]:
        message["reasoning_content"] = "because"
    whole, earlier = samples(template(QWEN_LIKE, STOPS), messages)
    assert runs(whole) == ["<think>\nbecause\n</think>\n\nfour<|im_end|>"]
    assert runs(earlier) == ["<think>\nbecause\n</think>\n\ntwo<|im_end|>"]
    assert decode(earlier.ids) == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n<think>\nbecause\n</think>\n\ntwo<|im_end|>"
    assert learned(QWEN_LIKE, messages, TrainOn.LAST_TURN) == runs(whole)


def test_a_generation_prompt_that_begins_a_thought_is_understood() -> None:
    assert learned(THINKING, says("one", "two")) == ["two<|im_end|>"]


def test_tools_reach_the_template_and_their_answers_are_not_learned() -> None:
    messages = [*says("one", "call"), {"role": "tool", "content": "42"}, {"role": "assistant", "content": "done"}]
    assert learned(GLM_LIKE, messages, tools=[{"name": "f"}]) == ["call<|observation|>", "done<|user|>"]


def test_a_template_without_stable_beginnings_is_refused_saying_why() -> None:
    with pytest.raises(
        ValueError, match=r"what the chat template has before messages\[1\] changes when that message follows, and .* no generation marks"
    ):
        learned(COUNTING, says("one", "two"))


def marks(source: str, begin: str = "", end: str = "") -> Any:
    """Marks around each answer's content, from `begin` through `end`."""

    def marked(messages: Sequence[Any], tools: Sequence[Any], options: Mapping[str, Any]) -> list[Span]:
        text = template(source, STOPS).render(messages, tools, False, options)
        parts = [f"{begin}{message['content']}{end}" for message in messages if message["role"] == "assistant"]
        return [(text.index(part), text.index(part) + len(part)) for part in parts]

    return marked


def test_marks_of_the_template_are_used_where_comparing_fails() -> None:
    marked = marks(COUNTING)
    assert learned(COUNTING, says("one", "two", "three", "four"), marked=marked) == ["two<|im_end|>", "four<|im_end|>"]
    assert learned(COUNTING, says("one", "two", "three", "four"), TrainOn.LAST_TURN, marked=marked) == ["four<|im_end|>"]
    assert learned(COUNTING, says("one", "two", "three", "four"), given=2, marked=marked) == ["four<|im_end|>"]


@pytest.mark.parametrize("end", ["", "<|im_end|>", "<|im_end|>\n"])
def test_marks_reach_through_the_stop_token_and_no_further(end: str) -> None:
    source = COUNTING.replace("<|im_end|>", "<|im_end|>\n")
    assert learned(source, says("one", "two", "three", "four"), marked=marks(source, end=end)) == ["two<|im_end|>", "four<|im_end|>"]


def test_marks_reach_through_the_marker_of_the_next_speaker_where_that_is_the_stop_token() -> None:
    source = COUNTING.replace("({{ message.role }} {{ loop.revindex }})", "<|{{ message.role }}|>{{ loop.revindex }}").replace(
        "<|im_end|>", ""
    )
    speaking = "<|user|>" + source.replace("{{ loop.revindex }}", "")
    assert learned(source, says("one", "two", "three", "four"), marked=marks(source)) == ["two<|user|>", "four"]
    assert learned(speaking, OPENED[1:], marked=marks(speaking)) == ["two<|user|>"]


@pytest.mark.parametrize(
    ("end", "special", "remark"),
    [
        ("", (), "answers end with no token at which the model could stop .*, but with other text such as 'two'"),
        ("<|end|>", ("<|end|>",), "answers end with <|end|>, which is none of the model's stop tokens"),
    ],
)
def test_marks_without_a_stop_token_are_remarked(end: str, special: tuple[str, ...], remark: str) -> None:
    source = COUNTING.replace("<|im_end|>", "<|end|>")
    (made,) = samples(template(source, STOPS, marks(source, end=end), special), says("one", "two"))
    assert runs(made) == [f"two{end}"]
    assert re.search(remark.replace("|", r"\|"), made.remarks[0])


def test_marks_that_are_not_one_for_each_answer_or_hold_nothing_of_one_are_refused() -> None:
    def marked(*spans: Span) -> Any:
        return lambda messages, tools, options: list(spans)

    messages = says("one", "two", "three", "four")
    for spans in ([(1, 2)], [(1, 2), (3, 4), (5, 6)]):
        with pytest.raises(ValueError, match=rf"^the chat template marks {len(spans)} parts of it for 2 of the assistant's messages; "):
            learned(COUNTING, messages, marked=marked(*spans))
    with pytest.raises(ValueError, match=r"^the chat template's generation marks hold nothing of messages\[1\]; "):
        learned(COUNTING, messages, marked=marked((1, 1), (5, 6)))


def test_a_token_across_the_end_of_a_turn_is_refused() -> None:
    stop = CHATML.replace("<|im_end|>", "\n")
    with pytest.raises(
        ValueError, match="a token lies across the border of the assistant's turn at character 48, and the chat template has no"
    ):
        samples(template(stop, ["\n"]), says("one", "two", "three", "four"))


def test_an_answer_that_begins_within_a_token_is_encoded_by_itself() -> None:
    assert learned(CHATML, says("one", "\ntwo", "three", "\n\nfour")) == ["\ntwo<|im_end|>", "\n\nfour<|im_end|>"]


def test_what_the_template_raises_is_told() -> None:
    with pytest.raises(ValueError, match="the chat template refuses it: "):
        learned("{{ 1 // (messages | length - 2) }}", says("one", "two"))


# Wants a question before anything is said, as templates of Qwen do.
ASKING = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}{{ raise_exception('No user query found in messages.')"
    " }}{% endif %}" + CHATML
)
OPENED = [{"role": "assistant", "content": "welcome"}, *says("one", "two")]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (
            OPENED,
            r"messages\[0\] is the assistant's: the chat template can't render what comes before it \(No user query found in messages\.\)",
        ),
        (
            [{"role": "system", "content": "be brief"}, *OPENED],
            r"the chat template can't render the messages before messages\[1\] by themselves \(No user query found in messages\.\)",
        ),
    ],
)
def test_a_template_that_refuses_a_beginning_refuses_the_line_and_not_the_rank(messages: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}, and the chat template has no generation marks; "):
        learned(ASKING, messages)
    assert learned(ASKING, messages, TrainOn.ALL) == [template(ASKING, STOPS).render(messages, (), False, {})]


def test_marks_of_the_template_are_used_where_it_refuses_a_beginning() -> None:
    assert learned(ASKING, OPENED, marked=marks(ASKING)) == ["welcome<|im_end|>", "two<|im_end|>"]


def test_what_the_template_raises_while_its_marks_are_looked_for_is_told() -> None:
    def marked(messages: Sequence[Any], tools: Sequence[Any], options: Mapping[str, Any]) -> list[Span]:
        raise jinja2.TemplateError("no such role\nmore")

    with pytest.raises(ValueError, match=r"^the chat template refuses it: no such role$"):
        learned(COUNTING, says("one", "two"), marked=marked)


def tokenizer(chat: ChatTemplate | None) -> Tokenizer:
    return Tokenizer(encode=lambda text: encode(text)[0], begin=(), end=None, pad=0, chat=chat)


def test_a_sample_in_which_nothing_is_learned_is_an_error_that_names_its_line() -> None:
    broken = Broken("x.jsonl")
    samples = [Sample("one two", None, 1), Conversation(({"role": "user", "content": "hello"},), 0, (), 2)]
    encoded = encode_samples(samples, tokenizer(template(CHATML, STOPS)), TrainOn.ASSISTANT, broken)
    assert [item.line for item in encoded] == [1]
    with pytest.raises(ConfigError, match=r"1 broken lines in the data: x\.jsonl:2: no token of it is learned"):
        broken.refuse()


def test_messages_without_a_chat_template_are_an_error_that_names_the_line_and_the_setting() -> None:
    broken = Broken("x.jsonl")
    assert encode_samples([Conversation(tuple(says("one", "two")), 0, (), 7)], tokenizer(None), TrainOn.ASSISTANT, broken) == []
    with pytest.raises(ConfigError, match=r"x\.jsonl:7: chats \(`messages`, .*: set training\.data\.chatTemplate to a file with one"):
        broken.refuse()
