"""What is loaded to chat with, what is refused before that, and how requests are answered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep_train.base.errors import ConfigError
from lockstep_train.chat import Loaded, Pieces, Requests, find_source, refuse_unfit
from lockstep_train.checkpoint.format.manifest import decode, encode
from lockstep_train.checkpoint.format.views import keep_tokenizer
from lockstep_train.checkpoint.format.volume import write_record
from lockstep_train.data.tokens.turns import ChatTemplate
from support.checkpoint_cases import make_commit, record


def write(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer_config.json"):
        write(tmp_path / "base" / name, {})
    return tmp_path / "base"


@pytest.fixture
def run(tmp_path: Path, base: Path) -> Path:
    """A run with commits of the steps 10 and 20, which its adapter is older than."""
    run = tmp_path / "runs/demo"
    for step in (10, 20):
        manifest = make_commit(run / "checkpoints", f"step-{step}.a1") / "manifest.json"
        config = {"config": {"base_model_name_or_path": str(base)}, "names": {}}
        manifest.write_bytes(encode(replace(decode(manifest.read_bytes()), adapter=config)))
    write_record(run / "checkpoints", record(1))
    write(run / "adapter/adapter_config.json", {"base_model_name_or_path": str(base)})
    os.utime(write(run / "adapter/adapter_model.safetensors", ""), (1, 1))
    return run


def loaded_folder(folder: Path, step: int | None = None) -> Path:
    source = find_source(folder, step, None)
    assert source is not None
    return source.folder


def test_the_adapter_that_was_written_last_is_loaded_or_that_of_the_step(run: Path) -> None:
    assert loaded_folder(run).name == "step-20.a1"
    assert loaded_folder(run, 10).name == "step-10.a1"
    os.utime(run / "adapter/adapter_model.safetensors")
    assert loaded_folder(run) == loaded_folder(run / "adapter") == run / "adapter"
    (run / "adapter/adapter_model.safetensors").unlink()
    assert loaded_folder(run).name == "step-20.a1"


def test_a_step_that_has_no_commit_is_refused_with_those_that_have(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no commit of step 15: there are those of 10, 20"):
        find_source(run, 15, None)


def test_a_commit_of_full_fine_tuning_has_no_adapter(run: Path) -> None:
    manifest = run / "checkpoints/step-20.a1/manifest.json"
    manifest.write_bytes(encode(replace(decode(manifest.read_bytes()), adapter={"config": None, "names": {}})))
    with pytest.raises(ConfigError, match=r"step-20\.a1 was trained with method Full"):
        find_source(run, 20, None)


def test_the_template_and_the_variables_of_the_run_are_those_of_its_chats(run: Path, base: Path) -> None:
    template = write(run.parent / "t.jinja", "mine")
    keep_tokenizer(base, run, template, {"enable_thinking": False})
    source = find_source(run, None, None)
    assert source is not None and source.variables == {"enable_thinking": False}
    assert source.template == run / "tokenizer/chat_template.jinja"
    keep_tokenizer(base, run, template)
    source = find_source(run, None, None)
    assert source is not None and source.variables is None, "the run learns other data now"


@pytest.mark.parametrize(
    ("template", "fits"),
    [({}, False), ({"tokenizer_config.json": {"chat_template": "x"}}, True), ({"chat_template.jinja": "x"}, True)],
)
def test_a_chat_needs_a_template(run: Path, base: Path, template: dict[str, Any], fits: bool) -> None:
    for name, content in template.items():
        write(base / name, content)
    source = find_source(run, None, None)
    assert source is not None
    refuse_unfit(source, chat=False)
    if fits:
        refuse_unfit(source, chat=True)
        return
    with pytest.raises(ConfigError, match=r"base has no chat template.* a chat needs a run with training\.data\.chatTemplate"):
        refuse_unfit(source, chat=True)


REFUSALS = """
import sys
import threading
from collections.abc import Iterator
from lockstep_train.chat import main
print(main(sys.argv[1:]), "torch" in sys.modules, "transformers" in sys.modules)
"""


@pytest.mark.parametrize(
    ("case", "code", "words"),
    [
        ("no commit", 0, '{"none": '),
        ("no template", 78, "has no chat template"),
        ("another base", 78, "is not the base model that "),
        ("no model", 78, "holds no config.json"),
        ("no run", 78, "is not a run's folder"),
        ("nothing to refuse", 0, '{"adapter": '),
    ],
)
def test_what_needs_no_weights_is_refused_without_torch(run: Path, base: Path, case: str, code: int, words: str) -> None:
    folder, options = run, ["--chat", "--check"]
    if case == "no commit":
        folder = run.parent / "new"
        (folder / "gang").mkdir(parents=True)
    elif case == "another base":
        manifest = run / "checkpoints/step-20.a1/manifest.json"
        whole = decode(manifest.read_bytes())
        manifest.write_bytes(encode(replace(whole, identity=replace(whole.identity, base_files={"config.json": "0" * 64}))))
    elif case == "no model":
        options = ["--model", str(run)]
    elif case == "nothing to refuse":
        write(base / "chat_template.jinja", "x")
    elif case == "no run":
        folder = base
    told = subprocess.run([sys.executable, "-c", REFUSALS, str(folder), *options], capture_output=True, text=True, check=False, timeout=60)
    assert words in told.stdout + told.stderr
    assert f"{code} False False" in told.stdout + told.stderr


WORDS = ChatTemplate(
    render=lambda messages, tools, prompted, options: " ".join(f"{message['role']} {message['content']}" for message in messages),
    marked=None,
    encode=lambda text: ([1] * len(text.split()), []),
    stops=(),
)


def model_with_room(room: int) -> Loaded:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=room))
    tokenizer = SimpleNamespace(encode=lambda text: [1] * len(text.split()))
    return Loaded(SimpleNamespace(config=config), tokenizer, WORDS, ())


CHAT = [{"role": role, "content": "one two three"} for role in ("user", "assistant", "user", "assistant", "user")]


@pytest.mark.parametrize(("room", "count"), [(100, 20), (21, 20), (20, 12), (5, 4)])
def test_the_first_messages_are_left_out_where_the_model_has_no_room_for_all(room: int, count: int) -> None:
    ids, more = model_with_room(room).tokens_of({"messages": CHAT})
    assert (len(ids), more) == (count, room - count)


@pytest.mark.parametrize("request_", [{"messages": CHAT}, {"prompt": "one two three four"}])
def test_what_the_model_has_no_room_for_at_all_is_refused_in_a_sentence(request_: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="that is 4 tokens, and the model has room for 4 with its answer: say it in fewer words"):
        model_with_room(4).tokens_of(request_)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no text to go on from"):
        model_with_room(4).tokens_of({"prompt": ""})


def test_a_letter_is_said_when_all_of_its_bytes_are_there() -> None:
    text = "aü日🙂".encode()
    tokenizer = SimpleNamespace(decode=lambda ids, **_: bytes(ids).decode(errors="replace"))
    pieces: list[dict[str, Any]] = []
    streamer = Pieces(tokenizer, [], pieces.append)
    streamer.put(None)
    for byte in text[:-1]:
        streamer.put(SimpleNamespace(tolist=lambda byte=byte: [byte]))
    assert [piece["piece"] for piece in pieces] == ["a", "ü", "日"]
    streamer.end()
    assert pieces[-1] == {"piece": "\N{REPLACEMENT CHARACTER}"}, "what was cut off is not hidden"


def test_a_stop_is_of_the_request_before_it_and_the_end_stops_too() -> None:
    begin, stopped = threading.Event(), []

    def lines() -> Iterator[bytes]:
        begin.wait(60)
        for line in (b'{"prompt": "a"}', b'{"stop": true}', b'{"prompt": "b"}'):
            yield line
            stopped.append(requests.stopped.is_set())

    requests = Requests(lines())
    begin.set()
    assert [requests.queue.get() for _ in range(3)] == [{"prompt": "a"}, {"prompt": "b"}, None]
    assert stopped == [False, True, False] and requests.stopped.is_set()
