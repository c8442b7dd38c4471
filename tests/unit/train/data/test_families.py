"""What of a chat is learned with the templates that people fine-tune: every answer once, through its stop token, after exactly what the
model is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from lockstep_spec.choices import TrainOn
from lockstep_train.data.tokens.chat import Encoded
from lockstep_train.data.tokens.turns import LOST_CALL, LOST_CONTENT, LOST_THOUGHT, NO_THOUGHT, OWN_THOUGHT, ChatTemplate
from support.checkout import ROOT
from unit.train.data.chat_cases import TEXTS, decode, runs, samples, says, template
from unit.train.data.chat_families import CHATML, FAMILIES, GLM, QWEN3, Family

PAGE = ROOT / "docs/how-to/data.md"
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"x": "answer0"}}}
CALLING: list[dict[str, Any]] = [
    {"role": "user", "content": "question1"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "result"},
    {"role": "assistant", "content": "answer1"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}}]


def chat_of(family: Family) -> ChatTemplate:
    return template(family.template, family.stops)


def learned(sample: Encoded) -> str:
    return "".join(runs(sample))


def everything(made: list[Encoded]) -> str:
    return "".join(map(learned, made))


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


def thinking(family: Family, count: int = 2) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number in range(1, count + 1):
        messages += [{"role": "user", "content": f"question{number}"}]
        messages += [{"role": "assistant", **family.thought(f"thought{number}", f"answer{number}")}]
    return messages


def conversations(family: Family) -> dict[str, list[dict[str, Any]]]:
    """Of the forms that the family has."""
    several = says("question1", "answer1", "question2", "answer2", "question3", "answer3")
    cases = {"one": several[:2], "several": several, "system": [{"role": "system", "content": "system"}, *several]}
    if family.thinks:
        cases |= {"thoughts": thinking(family, 3), "one thought": [*thinking(family, 1), *several[2:]]}
    if family.calls:
        cases["calls"] = CALLING
    return cases


def expected_words(messages: list[dict[str, Any]]) -> list[str]:
    """What the assistant says in them, word by word."""
    mine = str([message for message in messages if message["role"] == "assistant"])
    return [f"{kind}{number}" for kind in ("answer", "thought") for number in range(4) if f"{kind}{number}" in mine]


def test_every_answer_and_thought_is_learned_once_and_nothing_that_others_say(family: Family) -> None:
    for case, messages in conversations(family).items():
        text = everything(samples(chat_of(family), messages, tools=TOOLS if case == "calls" else ()))
        assert {word: text.count(word) for word in expected_words(messages)} == dict.fromkeys(expected_words(messages), 1), (case, text)
        assert not [word for word in ("question", "system", "result") if word in text], (case, text)


def test_every_learned_run_ends_with_a_stop_token_and_has_no_other(family: Family) -> None:
    for case, messages in conversations(family).items():
        for sample in samples(chat_of(family), messages, tools=TOOLS if case == "calls" else ()):
            for run in runs(sample):
                assert run.endswith(family.stops), (case, run)
                assert sum(run.count(stop) for stop in family.stops) == 1, (case, run)


def test_a_sample_begins_with_what_the_model_is_given(family: Family) -> None:
    """Every turn's context is in one of the samples, letter by letter, as the server will render it."""
    chat = chat_of(family)
    for case, messages in conversations(family).items():
        texts = [decode(sample.ids) for sample in samples(chat, messages, tools=TOOLS if case == "calls" else ())]
        last = len(messages) - 1
        given = chat.render(messages[:last], TOOLS if case == "calls" else (), True, {})
        without = given.removesuffix("<think>\n").removesuffix("<think>\n\n")  # of an answer that has no thought
        assert texts[0].startswith(given if case == "thoughts" else without), (case, texts[0], given)


def test_the_last_turn_alone_can_be_learned(family: Family) -> None:
    for case, messages in conversations(family).items():
        made = samples(chat_of(family), messages, TrainOn.LAST_TURN, tools=TOOLS if case == "calls" else ())
        assert len(made) == 1
        assert learned(made[0]) == runs(samples(chat_of(family), messages, tools=TOOLS if case == "calls" else ())[0])[-1]


def test_all_of_it_ends_with_a_stop_token_too(family: Family) -> None:
    (whole,) = samples(chat_of(family), says("question1", "answer1"), TrainOn.ALL)
    assert set(whole.learned) == {1}
    assert decode(whole.ids).rstrip().endswith(family.stops)


def marked(text: str, family: Family) -> str:
    """As the preview marks stop tokens, and as a table of Markdown needs it."""
    for stop in family.stops:
        text = text.replace(stop, f"«{stop}»")
    return "`" + text.replace("\n", "↵").replace("|", "\\|") + "`"


def row(family: Family) -> str:
    chat = chat_of(family)
    answer = marked(learned(samples(chat, says("What is 2+2?", "Four."))[0]), family)
    message: Mapping[str, Any] = {"role": "assistant", **family.thought("2+2=4", "Four.")}
    thought = marked(learned(samples(chat, [{"role": "user", "content": "What is 2+2?"}, message])[0]), family) if family.thinks else ""
    call = marked(runs(samples(chat, CALLING, tools=TOOLS)[0])[0], family).partition("«")[2].partition("»")[0] if family.calls else ""
    count = len(
        samples(chat, thinking(family, 3) if family.thinks else [{"role": "system", "content": "s"}, *conversations(family)["several"]])
    )
    return f"| {family.name} | {answer} | {thought} | {f'`{call}`' if call else ''} | {count} |"


def test_the_page_has_the_learned_text_of_every_family() -> None:
    table = [row(family) for family in FAMILIES]
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith(f"| {FAMILIES[0].name} |")), 0)
    assert lines[first : first + len(table)] == table, "\n".join(table)


BY_NAME = {family.name: family for family in FAMILIES}


@pytest.mark.parametrize("name", ["DeepSeek-R1", "Nemotron-3"])
def test_answers_without_the_thought_that_the_prompt_begins_are_remarked(name: str) -> None:
    (made,) = samples(chat_of(BY_NAME[name]), says("question1", "answer1", "question2", "answer2"))
    assert made.remarks == (NO_THOUGHT, NO_THOUGHT)
    assert [run.startswith("answer") for run in runs(made)] == [True, True]
    assert samples(chat_of(BY_NAME[name]), thinking(BY_NAME[name]))[0].remarks == ()


@pytest.mark.parametrize("name", ["Qwen3", "GLM-4.5, 4.6"])
def test_answers_without_a_thought_after_a_prompt_that_leaves_thinking_to_the_model_are_remarked(name: str) -> None:
    chat = chat_of(BY_NAME[name])
    (made,) = samples(chat, says("question1", "answer1"))
    assert made.remarks == (OWN_THOUGHT,)
    assert learned(made).strip().startswith("answer1"), "the empty thought is form, not learned"
    assert samples(chat, thinking(BY_NAME[name], 1))[0].remarks == ()


def test_thinking_that_is_switched_off_is_what_the_model_is_given_and_no_matter_of_remarks() -> None:
    for name, given in (
        ("Nemotron-3", "assistant\n<think></think>"),
        ("Qwen3", "assistant\n<think>\n\n</think>\n\n"),
        ("GLM-4.5, 4.6", "<|assistant|>\n<think></think>"),
    ):
        (made,) = samples(chat_of(BY_NAME[name]), says("question1", "answer1"), options={"enable_thinking": False})
        assert made.remarks == ()
        assert given in decode(made.ids)
        assert learned(made).startswith("answer1") or learned(made).startswith("\nanswer1"), learned(made)


def test_a_thought_without_its_first_tag_is_put_after_the_one_of_the_prompt() -> None:
    """DeepSeek-R1 writes no <think>, for it is given one; so do data that were made with it."""
    messages = [{"role": "user", "content": "question1"}, {"role": "assistant", "content": "thought1\n</think>\n\nanswer1"}]
    (made,) = samples(chat_of(BY_NAME["DeepSeek-R1"]), messages)
    assert decode(made.ids).count("<think>") == 1
    assert learned(made) == "thought1\n</think>\n\nanswer1<｜end▁of▁sentence｜>"


def test_a_thought_in_a_field_that_the_template_ignores_is_restored_where_it_thinks_and_remarked_where_not() -> None:
    messages = [{"role": "user", "content": "question1"}, {"role": "assistant", "reasoning_content": "thought1", "content": "answer1"}]
    assert learned(samples(chat_of(BY_NAME["DeepSeek-R1"]), messages)[0]) == "thought1\n</think>\n\nanswer1<｜end▁of▁sentence｜>"
    (made,) = samples(chat_of(BY_NAME["Phi-4"]), messages)
    assert (learned(made), made.remarks) == ("answer1<|im_end|>", (LOST_THOUGHT,))


def test_calls_and_words_beside_them_that_the_template_leaves_out_are_remarked() -> None:
    messages = [
        {"role": "user", "content": "question1"},
        {"role": "assistant", "content": "answer1", "tool_calls": [CALL | {"function": {"name": "weather", "arguments": {}}}]},
    ]
    with pytest.raises(ValueError, match=f"no token of it is learned: its {LOST_CALL}"):
        samples(chat_of(BY_NAME["Phi-4"]), messages)
    (made,) = samples(chat_of(BY_NAME["Phi-4"]), [*messages, *says("question2", "answer2")])
    assert (learned(made), made.remarks) == ("answer2<|im_end|>", (LOST_CALL,))
    assert samples(chat_of(BY_NAME["Mistral"]), messages)[0].remarks == (LOST_CONTENT,)


def test_two_answers_in_a_row_are_both_learned_where_the_template_allows_them(family: Family) -> None:
    messages = [*says("question1", "answer1"), {"role": "assistant", "content": "answer2"}]
    if family.name == "Gemma 2, 3":
        with pytest.raises(ValueError, match="the chat template refuses it: roles must alternate"):
            samples(chat_of(family), messages)
        return
    text = everything(samples(chat_of(family), messages))
    assert (text.count("answer1"), text.count("answer2")) == (1, 1)


def test_a_rewritten_context_makes_an_earlier_answer_a_sample_of_its_own() -> None:
    """Mistral's system message stands in the last question only."""
    chat = chat_of(BY_NAME["Mistral"])
    messages = [{"role": "system", "content": "system"}, *says("question1", "answer1", "question2", "answer2")]
    texts = [decode(sample.ids) for sample in samples(chat, messages)]
    assert texts == [
        "<s>[INST] question1[/INST] answer1</s>[INST] system\n\nquestion2[/INST] answer2</s>",
        "<s>[INST] system\n\nquestion1[/INST] answer1</s>",
    ]


def test_answers_that_end_with_a_token_which_is_no_stop_token_are_remarked() -> None:
    chat = template(BY_NAME["Qwen2.5, ChatML"].template, ["<|endoftext|>"], special=["<|im_start|>", "<|im_end|>"])
    (made,) = samples(chat, says("question1", "answer1"))
    assert runs(made) == ["answer1<|im_end|>"]
    assert "answers end with <|im_end|>, which is none of the model's stop tokens (<|endoftext|>)" in made.remarks[0]


def test_answers_that_end_with_other_text_are_remarked_and_those_without_an_end_refused() -> None:
    plain = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}END {% endfor %}{% if add_generation_prompt %}assistant: {%"
        " endif %}"
    )
    (made,) = samples(template(plain, ["</s>"]), says("question1", "answer1"))
    assert (
        "answers end with no token at which the model could stop (its stop tokens: </s>), but with other text such as 'END'"
        in made.remarks[0]
    )
    with pytest.raises(
        ValueError,
        match=r"the chat template puts nothing after messages\[1\] at which the model could learn to stop \(its stop tokens: </s>\); ",
    ):
        samples(template(plain.replace("END", ""), ["</s>"]), says("question1", "answer1"))


def test_a_template_that_leaves_out_an_answer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the chat template leaves out the content of messages\[1\], or changes it"):
        samples(
            template(
                "{% for message in messages %}{{ message.role }}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant{% endif %}",
                ["<|im_end|>"],
            ),
            says("question1", "answer1"),
        )


def test_messages_that_are_not_to_be_trained_are_given_and_not_learned(family: Family) -> None:
    messages = says("question1", "answer1", "question2", "answer2")
    made = samples(chat_of(family), messages, untrained=(1,))
    assert "answer1" not in everything(made)
    assert everything(made).count("answer2") == 1
    assert len(made) == 1
    with pytest.raises(ValueError, match=r"`train: false` and `weight: 0` need training\.data\.trainOn Assistant or LastTurn"):
        samples(chat_of(family), messages, TrainOn.ALL, untrained=(1,))


def test_the_date_that_a_template_writes_is_the_same_on_every_day() -> None:
    for name, date in (("Llama 3", "01 Jan 2025"), ("gpt-oss", "2025-01-01")):
        assert date in decode(samples(chat_of(BY_NAME[name]), says("question1", "answer1"))[0].ids)
    assert TEXTS


CALLED = CHATML.replace("{{ call.function | tojson }}", "{{ call.function.name }} ARGUMENTS")
"""A template that renders a call's arguments in one of the ways below."""


@pytest.mark.parametrize(
    ("arguments", "as_text", "as_object"),
    [
        ("call.function.arguments | tojson", '{"x": "é"}', '{"x": "é"}'),
        ("call.function.arguments.x", "é", "é"),
        ("call.function.name + ' ' + call.function.arguments", 'f {"x":"é"}', 'f {"x": "é"}'),
        ("'' ~ call.function.arguments", '{"x":"é"}', '{"x": "é"}'),
    ],
)
@pytest.mark.parametrize("tools", [(), TOOLS])
def test_arguments_are_given_as_the_template_takes_them_whichever_way_the_data_have_them(
    arguments: str, as_text: str, as_object: str, tools: list[Any]
) -> None:
    chat = template(CALLED.replace("ARGUMENTS", f"{{{{ {arguments} }}}}"), BY_NAME["Qwen2.5, ChatML"].stops)
    for given, expected in (('{"x":"é"}', as_text), ({"x": "é"}, as_object)):
        call = {"type": "function", "function": {"name": "f", "arguments": given}}
        (made,) = samples(
            chat, [{"role": "user", "content": "question1"}, {"role": "assistant", "content": "", "tool_calls": [call]}], tools=tools
        )
        assert learned(made) == f"<tool_call>\nf {expected}\n</tool_call><|im_end|>"


@pytest.mark.parametrize(("given", "expected"), [("", "{}"), ("print(1)", '"print(1)"'), ("[1]", '"[1]"')])
def test_arguments_that_are_no_object_stay_text_and_empty_ones_are_none(given: str, expected: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": given}}
    messages = [{"role": "user", "content": "question1"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert f'"arguments": {expected}' in learned(samples(chat_of(BY_NAME["Qwen2.5, ChatML"]), messages)[0])


def test_the_marker_after_a_call_is_learned_also_where_arguments_have_to_be_text() -> None:
    glm = GLM.replace("call.function.arguments.x", "'' + call.function.arguments")
    (made,) = samples(template(glm, BY_NAME["GLM-4.5, 4.6"].stops), CALLING[:2], tools=TOOLS)
    assert learned(made).endswith("</tool_call><|observation|>")


def naming(family: Family, stop: str) -> list[list[dict[str, Any]]]:
    """Chats whose answer, thought or call names a stop token."""
    question = {"role": "user", "content": "question1"}
    chats = [[question, {"role": "assistant", "content": content}] for content in (f"the {stop} token", f" at {stop}", stop)]
    if family.thinks:
        chats.append([question, {"role": "assistant", **family.thought(f"the {stop} token", f"answer1 {stop} answer2")}])
        chats.append([question, {"role": "assistant", **family.thought(f"the {stop} token", f"the {stop} token")}])
    if family.calls:
        call = {"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {"x": f"the {stop} token"}}}
        chats.append([question, {"role": "assistant", "content": "", "tool_calls": [call]}])
    return chats


def test_an_answer_that_names_a_stop_token_is_learned_to_its_own_end(family: Family) -> None:
    """It is learned as one is that names another word in its place."""
    for stop in family.stops:
        for messages, plain in zip(naming(family, stop), naming(family, "STOP"), strict=True):
            tools = TOOLS if "tool_calls" in messages[1] else ()
            expected = everything(samples(chat_of(family), plain, tools=tools))
            assert everything(samples(chat_of(family), messages, tools=tools)) == expected.replace("STOP", stop), (stop, messages)


def test_an_answer_whose_stop_token_the_template_changes_is_refused() -> None:
    chat = template(CHATML.replace("message.content if", "message.content.replace('<|im_end|>', 'the end') if"), ["<|im_end|>"])
    with pytest.raises(ValueError, match=r"messages\[1\] names a stop token of the model, and the chat template changes it"):
        samples(chat, says("question1", "the <|im_end|> token is at the very end"))


def test_a_thought_that_the_answer_repeats_is_restored_or_remarked_as_any_other() -> None:
    question = {"role": "user", "content": "question1"}
    (made,) = samples(
        chat_of(BY_NAME["DeepSeek-R1"]), [question, {"role": "assistant", "content": "<think>\nFour\n</think>\n\nFour it is."}]
    )
    assert learned(made) == "Four\n</think>\n\nFour it is.<｜end▁of▁sentence｜>"
    (made,) = samples(chat_of(BY_NAME["Phi-4"]), [question, {"role": "assistant", "reasoning": "Four", "content": "Four it is."}])
    assert (learned(made), made.remarks) == ("Four it is.<|im_end|>", (LOST_THOUGHT,))
    (made,) = samples(chat_of(BY_NAME["Qwen3"]), [question, {"role": "assistant", "reasoning_content": "Four", "content": "Four it is."}])
    assert (learned(made), made.remarks) == ("<think>\nFour\n</think>\n\nFour it is.<|im_end|>", ())


def test_a_thought_is_found_behind_a_field_that_holds_none() -> None:
    message = {"role": "assistant", "reasoning_content": "", "thinking": "thought1", "content": "answer1"}
    (made,) = samples(chat_of(BY_NAME["gpt-oss"]), [{"role": "user", "content": "question1"}, message])
    assert "thought1" in learned(made)
    assert made.remarks == ()
    assert "thought1" in learned(samples(chat_of(BY_NAME["DeepSeek-R1"]), [{"role": "user", "content": "question1"}, message])[0])


def test_a_thought_in_two_fields_that_the_answer_repeats_is_learned_once() -> None:
    message = {"role": "assistant", "reasoning_content": "Four", "thinking": "Four", "content": "Four it is."}
    for name in ("Qwen3", "gpt-oss"):
        (made,) = samples(chat_of(BY_NAME[name]), [{"role": "user", "content": "question1"}, message])
        assert (learned(made).count("Four"), made.remarks) == (2, ())


def test_calls_and_contents_that_are_left_out_are_noticed_also_where_another_part_holds_the_same_words() -> None:
    question = {"role": "user", "content": "question1"}
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "weather", "arguments": {"x": "the weather"}}}
    with pytest.raises(ValueError, match=f"no token of it is learned: its {LOST_CALL}"):
        samples(chat_of(BY_NAME["Phi-4"]), [question, {"role": "assistant", "content": "the weather", "tool_calls": [call]}])
    (made,) = samples(chat_of(BY_NAME["Mistral"]), [question, {"role": "assistant", "content": "the weather", "tool_calls": [call]}])
    assert made.remarks == (LOST_CONTENT,)
    (made,) = samples(
        chat_of(BY_NAME["Qwen2.5, ChatML"]), [question, {"role": "assistant", "content": "the weather", "tool_calls": [call]}]
    )
    assert made.remarks == ()
    thought_alone = QWEN3.replace("{{ answer_of(message) if message.role == 'assistant' else message.content }}", "{{ message.role }}")
    with pytest.raises(ValueError, match=r"the chat template leaves out the content of messages\[1\], or changes it"):
        samples(
            template(thought_alone, ["<|im_end|>"]),
            [question, {"role": "assistant", "content": "<think>\nit is answer1\n</think>\n\nanswer1"}],
        )
