"""Texts that this version writes and that another version reads, with a value for every field, and how today's readers read each.

    PYTHONPATH=operator:workspace:tests .venv/bin/python -m recorded.recorder NUMBER-WORD

writes those that no folder beside this file has yet into the folder of that name, which belongs to the landing that brings them. What an
earlier landing has recorded stays as it is.
"""

from __future__ import annotations

import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from golden.plan_cases import CONTEXT, TRAINING, job, rdma_profile
from lockstep.api.status import TrainingJobStatus
from lockstep.plan.hosts.record import read_record, record_text
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults
from lockstep.plan.render.run import build_run, pod_placement, result_in
from lockstep.platforms.local.placement import local_run
from lockstep_gang.contract.interactive import Interactive
from lockstep_gang.contract.messages import (
    AgentMessage,
    Order,
    RankReport,
    agent_message,
    message_to_json,
    order,
    rank_report_from_json,
    rank_report_to_json,
)
from lockstep_gang.contract.preflight import PREFLIGHT_RESULT, PreflightReport
from lockstep_gang.contract.reply import Fact, FactType, Reply, parse_reply, reply_json
from lockstep_gang.contract.report import Cause, Report, State, parse_report, report_body
from lockstep_gang.contract.run import HostPlace, Run, parse_run, run_text
from lockstep_gang.coordinator.owner import Owner
from lockstep_gang.coordinator.records import GoodputRecord
from lockstep_gang.lifecycle.history import AttemptRecord, EndRecord
from lockstep_spec.codec import Must, from_json, to_json
from lockstep_train.base.runfile import parse_training
from lockstep_train.checkpoint.format.manifest import Manifest, decode, encode, seal, unseal
from lockstep_train.checkpoint.format.volume import Record
from support.hosts_told import facts, gpu, placed
from unit.platforms.local.joined.test_seats import runs as launched_runs

RECORDED = Path(__file__).resolve().parent
LINES = "texts.jsonl"
SEALED = ("chain", "manifest.json")
BOUNDED = (1, "lockstep-x.service", "shard-r00000-of-00001.safetensors", "Full")
"""Values for fields with bounds that no plain one is within."""
hints_of = cache(typing.get_type_hints)


def filled(kind: Any, text: str = "words", number: int = 3, items: int = 1) -> Any:  # noqa: PLR0911 (one return a kind of type)
    """A value of this type with every text, number and list as given; of an enumeration the last member."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        plain = filled(inner[0], text, number, items)
        bounds = [bound for bound in inner[1:] if isinstance(bound, Must) and not bound.holds(plain)]
        return next(value for value in BOUNDED if type(value) is type(plain) and bounds[0].holds(value)) if bounds else plain
    if origin in (typing.Union, types.UnionType):
        return filled(next(option for option in inner if option is not type(None)), text, number, items)
    if origin in (tuple, list):
        return origin(filled(inner[0], text, number, items) for _ in range(items))
    if origin in (dict, Mapping):
        return {f"{text[:20]}{key}": filled(inner[1], text, number, items) for key in range(items)}
    if kind in (str, int, bool, float, Any):
        return {str: text, int: number, bool: True, float: float(number)}.get(kind, text)
    if issubclass(kind, Enum):
        return list(kind)[-1]
    names = [f.name for f in fields(kind)] if is_dataclass(kind) else getattr(kind, "model_fields", None) or kind._fields
    hints = hints_of(kind, include_extras=True)
    values = {name: filled(hints[name], text, number, items) for name in names if name != "format"}
    return kind.model_construct(**values) if issubclass(kind, BaseModel) else kind(**values)


def _json(read: Callable[[Any], Any]) -> Callable[[str], Any]:
    return lambda text: read(json.loads(text))


def _run(text: str) -> Run:
    if (training := json.loads(text)["training"]) is not None:
        parse_training(training)  # the trainer refuses a setting that it doesn't know
    return parse_run(text)


def _record(kind: type) -> tuple[Callable[[Any], Any], Callable[[str], Any]]:
    return to_json, _json(lambda value: from_json(kind, value, "record"))


KINDS: Mapping[str, tuple[Callable[[Any], Any], Callable[[str], Any]]] = {
    "report": (report_body, lambda text: parse_report(text.encode())),
    "reply": (reply_json, lambda text: parse_reply(text.encode())),
    "preflight": (to_json, lambda text: result_in(PREFLIGHT_RESULT + text)),
    "status": (TrainingJobStatus.to_dict, _json(TrainingJobStatus.stored)),
    "run.json": (run_text, _run),
    "job.json": (record_text, _json(read_record)),
    "message": (message_to_json, _json(agent_message)),
    "order": (message_to_json, _json(order)),
    "rank report": (rank_report_to_json, _json(rank_report_from_json)),
    "attempts.jsonl": _record(AttemptRecord),
    "end.json": _record(EndRecord),
    "goodput.json": _record(GoodputRecord),
    "owner.json": _record(Owner),
    "chain": (lambda record: seal(to_json(record)), lambda text: from_json(Record, unseal(text), "record")),
    "manifest.json": (encode, decode),
}
"""Kind of a text → its writer, which may give plain JSON values, and its reader."""
Text = tuple[str, str]
"""Kind of the text, and its name among those of its kind."""
Made = Iterator[tuple[str, str, Any]]


def written(kind: str, value: Any) -> str:
    """The text of a value, by this version's writer."""
    text = KINDS[kind][0](value)
    return text if isinstance(text, str) else text.decode() if isinstance(text, bytes) else json.dumps(text)


def texts() -> dict[Text, Any]:
    """Every text as this version writes it: parsed, but for a sealed one, of which every byte counts. No build is stated, since each
    change of the code makes another.
    """
    made = {(kind, name): written(kind, value) for kind, name, value in (*_reports(), *_runs(), *_others())}
    texts = {key: text if key[0] in SEALED else json.loads(text) for key, text in sorted(made.items())}
    return {
        key: text | ({"build": "words"} if key[0] == "run.json" else {}) if isinstance(text, dict) else text for key, text in texts.items()
    }


def _reports() -> Made:
    plain = filled(Report)
    least = Report(plain.job, "x-0", 1, 1, 0, State.WAITING, "words", plain.nodes, plain.ranks)
    yield from (("report", state.value, replace(least, state=state)) for state in State)
    causes = (replace(plain.history[0], failure=replace(plain.failure, cause=cause)) for cause in Cause)
    yield "report", "every field", replace(plain, history=tuple(causes))
    yield "reply", "every field", Reply(tuple(replace(filled(Fact), type=kind) for kind in FactType), ("rack",))


def _runs() -> Made:
    training = TRAINING | {"evaluation": {"everySteps": 5}, "deepspeed": {"zero_optimization": {"reduce_bucket_size": 1}}}
    profile = rdma_profile(devices=["mlx5_0"], rails=[{"network": "rails/rail-0"}])
    resolved = resolve(job(training=training, nodes=2, preflight="Full"), profile, PlatformDefaults(namespace="team", uid="uid-1"))
    script = resolve(job(script={"command": ["true"]}), rdma_profile(), PlatformDefaults("/home/ada/workspace", uid="uid-1", image="local"))
    waiting = resolve(job(type="Interactive"), rdma_profile(), PlatformDefaults(namespace="team", uid="uid-1"))
    seat = placed(facts("lab0", "10.0.0.1", gpu(0)), facts("lab2", "10.0.0.2", gpu(1)))[0]
    pods = build_run(resolved, pod_placement(resolved, CONTEXT.report))
    yield "run.json", "pods", pods
    yield "run.json", "in one namespace", build_run(script, pod_placement(script, None))
    yield "run.json", "dev environment", build_run(waiting, pod_placement(waiting, CONTEXT.report))
    yield "run.json", "hosts", seat.run
    yield "run.json", "launched", launched_runs(script={"path": "rank.py"})[0]
    yield "run.json", "local", local_run(script, Path("/home/ada/key"), (29400, 29401), {})
    more = {"order": (1, 0), "node_ranks": (4, 3), "node_micro_batches": (2, 1), "attempts_before": 3, "environment": {"A": "1"}}
    yield "run.json", "every field", replace(pods, host=filled(HostPlace), interactive=filled(Interactive), **more)
    yield "job.json", "every field", replace(seat.record, unkept="words")


def _others() -> Made:
    for what, union in (("message", AgentMessage), ("order", Order), ("rank report", RankReport)):
        yield from ((what, kind.__name__, filled(kind)) for kind in typing.get_args(union))
    files = {"attempts.jsonl": AttemptRecord, "end.json": EndRecord, "goodput.json": GoodputRecord, "owner.json": Owner, "chain": Record}
    for what, kind in ({"preflight": PreflightReport, "status": TrainingJobStatus} | files).items():
        yield what, "every field", filled(kind)
    adapter = {"config": {"r": 16}, "names": {"a.lora_A": "a.lora_A"}}
    yield from (("manifest.json", one, replace(filled(Manifest), content=one, world_size=1, adapter=adapter)) for one in ("Full", "Lite"))


def recorded(folders: Path = RECORDED, without: str = "") -> dict[str, dict[Text, Any]]:
    """Folder → its texts, in the order of the landings."""
    read = {path.parent.name: map(json.loads, path.read_text(encoding="utf-8").splitlines()) for path in folders.glob(f"*/{LINES}")}
    names = sorted(read.keys() - {without}, key=lambda name: int(name.partition("-")[0]))
    return {name: {(kind, title): text for kind, title, text in read[name]} for name in names}


def newest(folders: Mapping[str, Mapping[Text, Any]]) -> dict[Text, Any]:
    """Each text as the newest folder that has it."""
    return {key: text for folder in folders.values() for key, text in folder.items()}


def main(name: str, folders: Path = RECORDED) -> None:
    """Write the folder of a landing: the texts that are not what the folders before it have."""
    earlier = recorded(folders, without=name)
    number = int(match[1]) if (match := re.fullmatch(r"([1-9][0-9]*)-[a-z][a-z-]*", name)) else 0
    latest = max((int(folder.partition("-")[0]) for folder in earlier), default=0)
    if number != latest + 1:
        sys.exit(f"{name} is not valid: must be {latest + 1}, a hyphen and a word, as {latest + 1}-causes")
    known = newest(earlier)
    lines = [json.dumps([*key, text], separators=(",", ":")) + "\n" for key, text in texts().items() if known.get(key) != text]
    (folders / name).mkdir(exist_ok=True)
    (folders / name / LINES).write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines)} texts in {folders / name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
