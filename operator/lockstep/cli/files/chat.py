"""`lockstep chat JOB`: talk to a job's newest adapter on its base model."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.files.generate import (
    BaseOption,
    GpusOption,
    MaxTokensOption,
    ModelOption,
    TunedArgument,
    shown,
    tuned_model,
)
from lockstep.cli.shared.jobargs import TargetOptions, on_site
from lockstep.cli.shared.signals import exiting_on_ctrl_c
from lockstep.platforms.output import put, put_text, tell

if TYPE_CHECKING:
    from lockstep.platforms.files.chat import TunedModel

KEYS = "Ctrl-C ends an answer, Ctrl-D the chat. A line that ends with a backslash goes on in the next one."
Message = dict[str, str]


@on_site
def chat(
    where: TargetOptions,
    job: TunedArgument,
    max_tokens: MaxTokensOption = 500,
    base: BaseOption = False,
    step: Annotated[int | None, typer.Option("--step", help="The checkpoint to make the adapter of. Default: the newest adapter.")] = None,
    model: ModelOption = None,
    gpus: GpusOption = 0,
) -> None:
    """Chat with a job's newest adapter.

    It loads the adapter on its base model, writes what you type in the job's chat template, and prints the answer token by token. With
    --base each answer of the base model comes first, in a conversation of its own. From a pipe, each line is a message.

    It runs where `lockstep generate` runs, and needs a chat template: the job's (training.data.chatTemplate) or the model's.

    Example: lockstep chat demo --base
    """
    with exiting_on_ctrl_c():
        tuned = tuned_model(where, job, gpus, {"--step": step, "--model": model}, "--chat")
        ChatTerminal().converse(lambda terminal: _chat(terminal, tuned, max_tokens, with_base=base))


async def _chat(terminal: ChatTerminal, tuned: AbstractAsyncContextManager[TunedModel], tokens: int, *, with_base: bool) -> None:
    said: dict[str, list[Message]] = {speaker: [] for speaker in (("base", "tuned") if with_base else ("tuned",))}
    async with tuned as model:
        if terminal.is_person:
            tell(KEYS)
        while (text := await terminal.text()) is not None:
            for speaker, messages in said.items():
                if with_base:
                    put_text(f"{speaker}: ")
                await _turn(terminal, model, messages, text, {"tokens": tokens, "base": speaker == "base"})


async def _turn(terminal: ChatTerminal, model: TunedModel, messages: list[Message], text: str, request: dict[str, Any]) -> None:
    """Show an answer, and remember it with what it answers; a text that is refused is forgotten."""
    from lockstep.platforms.files.chat import Unanswered

    question = {"role": "user", "content": text}
    try:
        with terminal.interrupting(model.stop):
            answer = await model.answer(request | {"messages": [*messages, question]}, shown())
        messages += [question, {"role": "assistant", "content": answer}]
    except Unanswered as refused:
        tell(refused)
    put_text("\n")


class ChatTerminal:
    """Standard input, read in the main thread for a conversation that goes on in another one: so a line is edited as in a shell, may come
    from any file, and Ctrl-C reaches it. Meanwhile connections are kept alive.
    """

    def __init__(self) -> None:
        self.is_person = sys.stdin.isatty() and sys.stdout.isatty()
        self._questions: SimpleQueue[tuple[str, Future[str | None]] | None] = SimpleQueue()
        self._interrupt: Callable[[], object] | None = None

    async def text(self) -> str | None:
        """Return the next text that isn't empty: a line, and those after it while they end with a backslash. None: there is no more."""
        while (text := await self._line("> ")) is not None:
            while text.endswith("\\") and (more := await self._line("… ")) is not None:
                text = f"{text[:-1]}\n{more}"
            if text.strip():
                return text
        return None

    async def _line(self, prompt: str) -> str | None:
        answer: Future[str | None] = Future()
        self._questions.put((prompt, answer))
        return await asyncio.wrap_future(answer)

    @contextmanager
    def interrupting(self, stop: Callable[[], Coroutine[Any, Any, None]]) -> Iterator[None]:
        """Let the first Ctrl-C call `stop` meanwhile. The next one ends the conversation."""
        loop = asyncio.get_running_loop()
        self._interrupt = lambda: asyncio.run_coroutine_threadsafe(stop(), loop)
        try:
            yield
        finally:
            self._interrupt = None

    def converse(self, talk: Callable[[ChatTerminal], Coroutine[Any, Any, None]]) -> None:
        """Answer what the conversation asks, until it ends. Raises what it raises, and KeyboardInterrupt once it has cleaned up."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)

        async def work() -> None:
            try:
                await talk(self)
            finally:
                self._questions.put(None)
                self._questions.put(None)  # for Ctrl-C after the first

        if self.is_person:
            with suppress(ImportError):
                import readline  # noqa: F401 (input() edits lines with it)
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="replace")
        before = signal.signal(signal.SIGINT, self._on_ctrl_c)
        thread.start()
        ended = asyncio.run_coroutine_threadsafe(work(), loop)
        try:
            while (question := self._questions.get()) is not None:
                question[1].set_result(self._read(question[0]))
            ended.result()
        except KeyboardInterrupt:
            ended.cancel()
            while self._questions.get() is not None:
                pass
            raise
        finally:
            signal.signal(signal.SIGINT, before)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def _on_ctrl_c(self, number: int, frame: FrameType | None) -> None:
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is None:
            raise KeyboardInterrupt
        interrupt()

    def _read(self, prompt: str) -> str | None:
        try:
            return input(prompt if self.is_person else "")
        except EOFError:
            if self.is_person:
                put("")
            return None
