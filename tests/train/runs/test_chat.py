"""A run that learns chats, and the program that answers with what it has learned: real ranks, a real model."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from rank_harness import ForkServer, RunFile

from lockstep_train.base.errors import ConfigError
from lockstep_train.chat import answer, find_source, load_source, refuse_unfit

TEMPLATE = "{% for m in messages %}{{ '<' + m.role + '> ' + m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
PROMPTED = "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
ASKED, ANSWERED = "of the shard", "never"


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    row = {"messages": [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}]}
    (folder / "chats.jsonl").write_text((json.dumps(row) + "\n") * 16)
    (folder / "template.jinja").write_text(TEMPLATE + PROMPTED)
    return folder


def asked(loaded: Any, *, stopped: bool = False, **request: Any) -> tuple[str, list[str]]:
    """Text of an answer, and the kinds of what was said."""
    said: list[dict[str, Any]] = []
    event = threading.Event()
    if stopped:
        event.set()
    answer(loaded, {"tokens": 12, **request}, event, said.append)
    return "".join(item.get("piece", "") for item in said), [next(iter(item)) for item in said]


def test_what_a_run_has_learned_of_chats_is_answered_in_its_template(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, chats: Path
) -> None:
    data = {"path": str(chats / "chats.jsonl"), "chatTemplate": str(chats / "template.jinja")}
    optimization = {"epochs": 20, "maxSteps": 30, "learningRate": "0.05", "schedule": "Constant", "globalBatchSize": 8}
    ranks.run("main", [run_file("run", data=data, optimization=optimization, evaluation=None, checkpoint={"everySteps": 15})])
    source = find_source(tmp_path / "run", 30, None)
    assert source is not None and source.variables == {}
    refuse_unfit(source, chat=True)
    loaded = load_source(source)
    question = {"messages": [{"role": "user", "content": ASKED}]}
    assert asked(loaded, **question)[0].strip() == ANSWERED
    assert asked(loaded, **question, base=True)[0].strip() != ANSWERED
    assert asked(loaded, prompt=ASKED)[0].startswith(ASKED)
    assert len(asked(loaded, stopped=True, prompt=ASKED)[1]) < len(asked(loaded, prompt=ASKED)[1])
    long = {"messages": [{"role": "user", "content": f"{ASKED} " * 1000}]}
    assert asked(loaded, **long)[1] == ["refused"]


def test_an_adapter_of_another_base_model_is_refused(ranks: ForkServer, run_file: RunFile, tmp_path: Path, model: Path) -> None:
    ranks.run("main", [run_file("run", optimization={"maxSteps": 1}, evaluation=None)])
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes() + b" " * (file.name == "config.json"))
    source = find_source(tmp_path / "run", None, other)
    assert source is not None and source.variables is None
    with pytest.raises(ConfigError, match=r"other is not the base model that .*run/adapter was trained on: its config\.json"):
        refuse_unfit(source, chat=False)
