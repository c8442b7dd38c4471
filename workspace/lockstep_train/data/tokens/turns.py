"""One turn of the assistant: what the model is given when it is asked, and what it writes, through the token at which it stops.

Both follow from the tokenizer's own chat template, so no template needs to be known: the first messages rendered with the generation prompt
are what the model is given; what the rendering of one message more has after that is what it writes. Three things need more than that.

- A stop token that is no part of the turn. In templates of GLM the marker of whoever speaks next is the stop token, so nothing stands after
  the last turn.
- Thoughts. A generation prompt may begin one that the answer lacks; a template may drop those of the data (DeepSeek-R1), though the model
  writes them.
- A context that is rendered otherwise once the answer follows, as Qwen3's is between two messages of the assistant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from lockstep_train.base.errors import first_line
from lockstep_train.data.read.records import THOUGHTS, texts_of

OPEN_THOUGHT = re.compile(r"<think>\s*\Z")
BEGUN_THOUGHT = re.compile(r"\s*(<think>\s*(</think>\s*)?|<\|channel>thought\s*(<channel\|>\s*)?)\Z")
"""End of a generation prompt that begins a thought; the second form is Gemma 4's."""
EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\n*")
"""Put in by templates of reasoning models where there was no thought (GLM, Qwen): form, not something to learn."""
CLOSED_AT_ONCE = re.compile(r"\s*</think>\n*")
"""The same after a generation prompt that has opened the thought."""
WRITTEN_THOUGHT = re.compile(r"\s*(?:<think>)?(?P<thought>.*?)</think>(?P<break>\s*)", re.DOTALL)

Span = tuple[int, int]
Message = dict[str, Any]


class Unmasked(ValueError):
    """Reason why the learned parts of a conversation can't be located."""


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template, reduced to what is needed of it."""

    render: Callable[[Sequence[Message], Sequence[Any], bool, Mapping[str, Any]], str]
    """(messages, tools, whether to end with the generation prompt, the row's own variables) → text. May raise what the template raises."""
    marked: Callable[[Sequence[Message], Sequence[Any], Mapping[str, Any]], list[Span]] | None
    """The parts that the template marks by `{% generation %}`, or None when it has no such marks."""
    encode: Callable[[str], tuple[list[int], list[Span]]]
    """Encoder: token ids without special tokens added, and where in the text each token stands."""
    stops: tuple[str, ...]
    """The tokens at which the model stops writing, as text."""
    special: frozenset[str] = frozenset()
    """All tokens that stand for themselves, stop tokens or not."""
    thinks: bool = False
    """The template speaks of thoughts between <think> and </think>."""


@dataclass(frozen=True)
class TemplateChoice:
    """Chat template that a run states."""

    path: str | None = None
    """A file of its own; None: the tokenizer's."""
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Chat:
    """A conversation with the template that renders it."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...]
    options: Mapping[str, Any]
    """Variables of the template that this row sets."""
    template: ChatTemplate

    def beginning(self, count: int, *, prompted: bool) -> str:
        """The first messages rendered alone. Raises Unmasked where the template refuses them."""
        try:
            return self.template.render(self.messages[:count], self.tools, prompted, self.options)
        except Exception as error:  # templates raise whatever they like, to refuse a role or an order
            reason = first_line(error) or type(error).__name__
            if not prompted:
                raise Unmasked(f"the chat template refuses it: {reason}") from error
            if count == 0:
                raise Unmasked(f"messages[0] is the assistant's: the chat template can't render what comes before it ({reason})") from error
            raise Unmasked(f"the chat template can't render the messages before messages[{count}] by themselves ({reason})") from error


@dataclass(frozen=True)
class Turn:
    """`context` + `form` + `answer` is the conversation up to the end of the turn, of which the answer is learned."""

    number: int
    context: str
    """Text that the model is given."""
    form: str
    """An empty thought that the template puts in."""
    answer: str
    """Text that the model writes, through its stop token."""
    remarks: tuple[str, ...] = ()
    """Oddities, in words that are the same for all turns of a kind."""

    @property
    def text(self) -> str:
        return self.context + self.form + self.answer

    @property
    def span(self) -> Span:
        """The answer's place in `text`."""
        return len(self.context) + len(self.form), len(self.text)


def turn_of(chat: Chat, number: int) -> Turn:
    """The assistant's message of this number, as the model meets it. Raises Unmasked; ValueError where no end could be learned."""
    turn = _without_end(chat, number)
    message = tokens_hidden(chat.messages[number], chat.template.stops)
    if message == chat.messages[number]:
        return _with_stop(turn, chat, turn.answer)
    answer = _without_end(_with_message(chat, number, message), number).answer
    if len(answer) != len(turn.answer):
        raise Unmasked(
            f"messages[{number}] names a stop token of the model, and the chat template changes it, so the turn's own end can't be told"
            " from it"
        )
    return _with_stop(turn, _with_message(chat, number, message), answer)


def _without_end(chat: Chat, number: int) -> Turn:
    """The turn with all that the template has after it."""
    context, answer, opened = _divided(chat, number)
    turn = _with_thought(Turn(number, context, "", answer), chat, opened)
    form = (CLOSED_AT_ONCE if OPEN_THOUGHT.search(turn.context) else EMPTY_THOUGHT).match(turn.answer)
    if form:
        turn = replace(turn, form=form.group(), answer=turn.answer[form.end() :])
    return _checked(turn, chat)


def _with_message(chat: Chat, number: int, message: Message) -> Chat:
    return replace(chat, messages=(*chat.messages[:number], message, *chat.messages[number + 1 :]))


def tokens_hidden(value: Any, tokens: Sequence[str]) -> Any:
    """Replace these tokens in a value's texts by as many other letters: those that a template renders are its own then."""
    if isinstance(value, str):
        for token in tokens:
            value = value.replace(token, "x" * len(token))
        return value
    if isinstance(value, Mapping):
        return {name: tokens_hidden(item, tokens) for name, item in value.items()}
    return [tokens_hidden(item, tokens) for item in value] if isinstance(value, list) else value


def place_of(turn: Turn, text: str) -> Span | None:
    """Place of the turn's answer in a rendering that goes on after it; None where the template has rewritten it, or what comes before it.

    An empty thought is form: it may be there or not.
    """
    for context in _without_thought(turn.context):
        for form in (turn.form, "") if text.startswith(context) else ():
            if text.startswith(form + turn.answer, len(context)):
                start = len(context) + len(form)
                return start, start + len(turn.answer)
    return None


def _divided(chat: Chat, number: int) -> tuple[str, str, bool]:
    """Divide a turn: what the model is given, what comes after it, and whether the generation prompt opens a thought."""
    problem: Unmasked | None = None
    prompt_text = None
    try:
        prompt_text = chat.beginning(number, prompted=True)
    except Unmasked as error:
        problem = error
    try:
        rendered = chat.beginning(number + 1, prompted=False)
    except Unmasked as error:
        raise problem or error from error
    opened = prompt_text is not None and OPEN_THOUGHT.search(prompt_text) is not None
    for context in _without_thought(prompt_text) if prompt_text is not None else ():
        if rendered.startswith(context):
            closed = prompt_text is not None and BEGUN_THOUGHT.search(prompt_text) is not None and not opened
            return prompt_text if prompt_text is not None and closed else context, rendered[len(context) :], opened
    contents = str(chat.messages[number])
    for prompt in _prompts(chat, number, prompt_text):
        for marker in _without_thought(prompt):
            if not marker.strip() or marker.strip() in contents or marker not in rendered:
                continue
            if prompt_text is None or rendered.count(marker) == prompt_text.count(marker) + (prompt != marker):
                end = rendered.rindex(marker) + len(marker)
                context = prompt_text[: len(prompt_text) - len(prompt) + len(marker)] if prompt_text is not None else rendered[:end]
                return context, rendered[end:], opened
    raise problem or Unmasked(f"what the chat template has before messages[{number}] changes when that message follows")


def _without_thought(prompt: str) -> Iterator[str]:
    """A generation prompt as it is, and without the thought that it begins, which the rendered answer may lack."""
    yield prompt
    begun = BEGUN_THOUGHT.search(prompt)
    if begun:
        whole = prompt[: begun.start()]
        yield whole + prompt[begun.start() : begun.start() + len(begun.group()) - len(begun.group().lstrip())]
        yield whole
    elif prompt != prompt.rstrip():
        yield prompt.rstrip()


def _prompts(chat: Chat, number: int, prompted: str | None) -> Iterator[str]:
    """Texts right before the turn, also where all that comes before is rendered otherwise: the message before it and the generation prompt,
    and that prompt alone.
    """
    before = str(chat.messages[number - 1].get("content") or "").strip() if number else ""
    if prompted is not None and before and before in prompted:
        yield prompted[prompted.rindex(before) :]
    if prompted is None:
        chat, number = replace(chat, messages=({"role": "user", "content": "?"},)), 1
    try:
        prompted = chat.beginning(number, prompted=True) if prompted is None else prompted
        plain = chat.beginning(number, prompted=False)
        same = next(
            (place for place, (one, other) in enumerate(zip(prompted, plain, strict=False)) if one != other), min(len(prompted), len(plain))
        )
        yield prompted[same:]
    except Unmasked:
        return


NO_THOUGHT = (
    "answers have no thought, but the chat template's generation prompt begins one, so the model will be asked for what it did not learn:"
    " give the data thoughts, or turn them off in the template (in many: training.data.chatTemplateKwargs enable_thinking: false)"
)
OWN_THOUGHT = (
    "answers have no thought, but after the chat template's generation prompt the model may think, which it then does as before training:"
    " give the data thoughts, or turn them off in the template, in training and later (in many: training.data.chatTemplateKwargs"
    " enable_thinking: false)"
)
LOST_THOUGHT = "answers have a thought in a field of its own that the chat template doesn't render: it is not learned"


def _with_thought(turn: Turn, chat: Chat, opened: bool) -> Turn:
    """Add the message's thought where the template dropped it, for that is what the model writes."""
    thought, others, changed, pause = _thought_of(chat.messages[turn.number])
    if not thought:
        thinks = opened or EMPTY_THOUGHT.match(turn.answer) is not None  # (which a prompt without thinking has itself)
        return replace(turn, remarks=(NO_THOUGHT if opened else OWN_THOUGHT,)) if thinks else turn
    if _renders(chat, turn, thought, others, changed):
        return _without_second_thought(turn)
    if pause is None and not (opened or chat.template.thinks):
        return replace(turn, remarks=(LOST_THOUGHT,))
    if opened and not OPEN_THOUGHT.search(turn.context):
        turn = replace(turn, context=turn.context + "<think>\n")
    begin = "" if OPEN_THOUGHT.search(turn.context) else "<think>\n"
    answer = turn.answer
    form = (CLOSED_AT_ONCE if not begin else EMPTY_THOUGHT).match(answer)
    answer = answer[form.end() :] if form else answer
    pause = "" if answer[:1].isspace() else "\n\n" if pause is None else pause
    return replace(turn, answer=f"{begin}{thought}\n</think>{pause}{answer}")


def _thought_of(message: Message) -> tuple[str, list[Any], Message, str | None]:
    """The thought, what else the message says, the message with STAND_IN in the thought's place, and the white space behind a thought that
    the content holds.
    """
    content = message.get("content")
    written = WRITTEN_THOUGHT.match(content) if isinstance(content, str) else None
    if isinstance(content, str) and written:
        begin, end = written.span("thought")
        changed = {**message, "content": content[:begin] + STAND_IN + content[end:]}
        return written["thought"].strip(), [content[end:], *_others(message, "content")], changed, written["break"]
    thoughts = {name: message[name] for name in THOUGHTS if isinstance(message.get(name), str) and message[name].strip()}
    thought = next(iter(thoughts.values()), "").strip()
    return thought, _others(message, *thoughts), message | dict.fromkeys(thoughts, STAND_IN), None


STAND_IN = "qx-a-part-of-this-message-xq"
"""Text in place of a part of a message, to see whether a template renders that."""


def _renders(chat: Chat, turn: Turn, text: str, others: Any, changed: Message) -> bool:
    """Return True if the template renders this part of the message. Where `others` hold the same text, too, the message `changed` tells,
    with STAND_IN in its place.
    """
    if text not in turn.answer:
        return False
    if not any(text in other for other in texts_of(others)):
        return True
    return shows(chat, turn.number, changed)


def shows(chat: Chat, number: int, changed: Message) -> bool:
    """Return True if the template renders STAND_IN where this message, with that in it, has the number's place."""
    try:
        return STAND_IN in _with_message(chat, number, changed).beginning(number + 1, prompted=False)
    except Unmasked:
        return True


def _others(message: Message, *names: str) -> list[Any]:
    """Parts of a message besides these."""
    return [value for name, value in message.items() if name not in (*names, "role")]


def _without_second_thought(turn: Turn) -> Turn:
    """Remove the empty thought that a template puts before a content which has its own."""
    context_open = OPEN_THOUGHT.search(turn.context) is not None
    form = (CLOSED_AT_ONCE if context_open else EMPTY_THOUGHT).match(turn.answer)
    if form is None:
        return turn
    answer = turn.answer[form.end() :].lstrip()
    return replace(turn, answer=answer.removeprefix("<think>").lstrip() if context_open else answer)


LOST_CONTENT = "answers have text beside a tool call that the chat template doesn't render: it is not learned"
LOST_CALL = (
    "answers call tools in a way that the chat template doesn't render: they are not learned, for the model would learn to stop at once;"
    " set training.data.chatTemplate to a template that renders calls"
)
LOST_TOOLS = "rows have `tools` that the chat template doesn't render: the model is not shown them; see training.data.chatTemplate"


def _checked(turn: Turn, chat: Chat) -> Turn:
    """Check a turn. Raises Unmasked where the answer isn't what the message says; templates may leave it out beside calls of tools."""
    message = chat.messages[turn.number]
    calls = message.get("tool_calls") or []
    if not all(_renders_call(chat, turn, number) for number in range(len(calls))):
        return replace(turn, remarks=(*turn.remarks, LOST_CALL))
    before, tag, own = str(message.get("content") or "").rpartition("</think>")
    changed = {**message, "content": before + tag + STAND_IN}
    if not own.strip() or _renders(chat, turn, own.strip()[-ENDING:], [before, *_others(message, "content")], changed):
        return turn
    if calls:
        return replace(turn, remarks=(*turn.remarks, LOST_CONTENT))
    raise Unmasked(f"the chat template leaves out the content of messages[{turn.number}], or changes it")


def _renders_call(chat: Chat, turn: Turn, number: int) -> bool:
    message = chat.messages[turn.number]
    calls = message["tool_calls"]
    function = calls[number]["function"]
    changed = {**calls[number], "function": {**function, "name": STAND_IN}}
    others = [*_others(message, "tool_calls"), *calls[:number], function["arguments"], *calls[number + 1 :]]
    return _renders(chat, turn, function["name"], others, {**message, "tool_calls": [*calls[:number], changed, *calls[number + 1 :]]})


ENDING = 20
"""Characters by which a content is looked for: what stands before may have been laid out anew."""


def _with_stop(turn: Turn, chat: Chat, shown: str) -> Turn:
    """The answer through the first stop token after the message's content, or with the one that would follow.

    `chat` and `shown` are without the stop tokens that the message names; `shown` is as long as the answer.
    """
    template, message = chat.template, chat.messages[turn.number]
    content = str(message.get("content") or "")
    parts = (content.strip(), content.rpartition("</think>")[2].strip())
    after = next((shown.find(part) + len(part) for part in parts if part and part in shown), 0)
    ends = [shown.index(stop, after) + len(stop) for stop in template.stops if stop in shown[after:]]
    if ends:
        return replace(turn, answer=turn.answer[: min(ends)])
    following = chat.messages[turn.number + 1]["role"] if turn.number + 1 < len(chat.messages) else ""
    marker = next_speaker(template, bool(message.get("tool_calls")) or following == "tool")
    if marker is not None:
        return replace(turn, answer=turn.answer + marker)
    end = turn.answer.rstrip()
    token = next((special for special in template.special if end.endswith(special)), None)
    if token is not None:
        return replace(turn, answer=end, remarks=(*turn.remarks, other_end(template, token)))
    if after and not end[after:].strip():
        raise ValueError(
            f"the chat template puts nothing after messages[{turn.number}] at which the model could learn to stop (its stop tokens:"
            f" {_named(template)}); set training.data.chatTemplate to a template that ends answers, or training.data.trainOn to All"
        )
    return replace(turn, remarks=(*turn.remarks, no_end(template, end[after:].strip()[:40] if after else "")))


def other_end(template: ChatTemplate, token: str) -> str:
    """Remark on answers that end with a token which is no stop token."""
    return (
        f"answers end with {token}, which is none of the model's stop tokens ({_named(template)}): generation won't stop there unless you"
        " add it to eos_token_id of generation_config.json, or tell the server to stop at it"
    )


def no_end(template: ChatTemplate, text: str) -> str:
    """Remark on answers that end without any."""
    return (
        f"answers end with no token at which the model could stop (its stop tokens: {_named(template)}), but with other text"
        f"{f' such as {text!r}' if text else ''}: generation won't stop there by itself; see training.data.chatTemplate"
    )


def _named(template: ChatTemplate) -> str:
    return ", ".join(template.stops) or "none"


@cache
def next_speaker(template: ChatTemplate, calls: bool) -> str | None:
    """The stop token with which the next message after an answer (or after calls of tools) begins; None where that is no stop token."""
    arguments = '{"x": "1"}' if takes_text(template, tools=False) else {"x": "1"}
    answer = calling(arguments) if calls else {"role": "assistant", "content": "y"}
    follower: Message = (
        {"role": "tool", "tool_call_id": "call00000", "name": "f", "content": "z"} if calls else {"role": "user", "content": "z"}
    )
    chat = Chat(({"role": "user", "content": "x"}, answer, follower), (), {}, template)
    try:
        shorter, longer = chat.beginning(2, prompted=False), chat.beginning(3, prompted=False)
    except Unmasked:
        return None
    following = longer[len(shorter) :] if longer.startswith(shorter) else ""
    return next((stop for stop in template.stops if following.startswith(stop)), None)


def calling(arguments: Any) -> Message:
    """A message that calls a tool."""
    call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@cache
def takes_text(template: ChatTemplate, tools: bool) -> bool:
    """Return True if arguments of calls have to be JSON text: the template refuses an object (DeepSeek's), or writes it in Python's
    form.
    """
    tool = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {}}}}

    def rendered(arguments: Any) -> str | None:
        try:
            return Chat(({"role": "user", "content": "x"}, calling(arguments)), (tool,) * tools, {}, template).beginning(2, prompted=False)
        except Unmasked:
            return None

    as_object = rendered({"x": "1"})
    return rendered('{"x": "1"}') is not None if as_object is None else "{'x': '1'}" in as_object
