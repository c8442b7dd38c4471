"""Data sets that other tools' files name, as sources of samples: of the hub, or files to bring."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from posixpath import basename, join
from typing import Any

from lockstep.api.errors import ConfigError
from lockstep.api.model import spelled
from lockstep.api.names import DATASETS, WORKSPACE
from lockstep.plan.translate import keys
from lockstep.plan.translate.leaves import Leaf
from lockstep.plan.translate.readers import UNSET, Beside, OtherTool

BRING = "which only /workspace and /datasets can hold: lockstep cp brings it"
BY_KEYS = "rows are read by their keys and rendered by the tokenizer's chat template: lockstep run --preview 3 shows them"
COLUMNS = "columns are read by the names that docs/how-to/data.md lists: rename others"
_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".feather", ".csv", ".tsv", ".txt", ".gz", ".zst", ".bz2", ".xz")
_FOLDERS = (
    "models", "model", "checkpoints", "checkpoint", "ckpt", "ckpts", "output", "outputs", "saves", "data", "dataset", "datasets",
    "pretrained", "weights", "results", "runs",
)  # fmt: skip
"""First parts of relative paths, which no organization of the hub has as its name."""
_OWN = ("path", "id", "name", "config", "split", "revision", "weight", "data_files")
"""Properties of a data set in a list that become fields."""
_HUBS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "path")
_READ = {
    "prompt": ("instruction", "text"), "query": ("input",), "response": ("output",), "history": ("history",), "system": ("system",),
    "messages": ("messages", "conversations"), "tools": ("tools",),
}  # fmt: skip
"""Column of LLaMA-Factory → names by which Lockstep finds it."""
_PREFERENCES = r"bradley_terry|stepwise|dpo|orpo|kto|\.(argilla|ultra|intel|icr|prompt_pairs|transform)|_transform"
"""Types of Axolotl's data sets that hold preferences, rewards or samples for them."""
_BUILDERS = ("json", "csv", "parquet", "arrow", "text")


@dataclass(frozen=True)
class Source:
    """A data set as another tool names it."""

    leaf: Leaf
    """The value that names it."""
    at: str
    """A path, or a name of the hub."""
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    weight: str | None = None
    is_text: bool = False
    note: str = ""

    def fields(self, source: str, beside: Beside) -> tuple[dict[str, Any], str]:
        """Return fields of data, or of one of data.sources, and what there is to say of them. Raises ConfigError for a placeholder."""
        path, note = on_volume(self.at, DATASETS) if is_file(self.at, beside) else (None, "")
        if path is None and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.at):
            where = f"{source}:{self.leaf.line}: {self.leaf.path}: {self.at}"
            raise ConfigError(f"{where}: is neither a file nor a data set of the hub: fill it in")
        fields = {
            "path": path,
            "name": self.at if path is None else None,
            "config": self.config,
            "split": self.split,
            "revision": self.revision if path is None else None,
            "format": "Text" if self.is_text else None,
            "weight": self.weight,
        }
        return {key: value for key, value in fields.items() if value is not None}, "; ".join(filter(None, (self.note, note)))


def apart(made: list[tuple[Source, dict[str, Any], str]]) -> list[tuple[Source, dict[str, Any], str]]:
    """Return the fields of several sources, with as many folders as tell files of the same name apart."""
    brought = {source.at: source.at.strip("/").split("/") for source, fields, _ in made if fields.get("path", source.at) != source.at}
    for count in range(1, max(map(len, brought.values()), default=0) + 1):
        tails = {at: "/".join(parts[-count:]) for at, parts in brought.items()}
        if len({*tails.values()}) == len(tails):
            break
    for source, fields, _ in made:
        if source.at in brought:
            fields["path"] = f"{DATASETS}/{tails[source.at]}"
    return made


def are_described(tool: OtherTool, by_key: Mapping[str, Leaf], beside: Beside) -> bool:
    """Tell whether dataset_info.json says of all data sets of a file what they hold."""
    folder, names = (str(by_key[key].value) if key in by_key else other for key, other in (("dataset_dir", "data"), ("dataset", "")))
    known = beside(f"{folder}/dataset_info.json") or ""
    return tool.name == "LLaMA-Factory" and all(f'"{name.strip()}"' in known for name in names.split(","))


def is_file(at: str, beside: Beside = lambda path: None) -> bool:
    """Tell a path or an address from a name of the hub."""
    if at.startswith(("/", ".", "~")) or "://" in at or "\\" in at or at.endswith(_SUFFIXES):
        return True
    return at.count("/") > 1 or at.partition("/")[0].lower() in _FOLDERS or beside(at) is not None


def on_volume(path: str, folder: str) -> tuple[str, str]:
    """Return the path on a volume, and what to do for it. Those below /workspace and /datasets, and stores' addresses, stay."""
    if path.startswith((f"{WORKSPACE}/", f"{DATASETS}/")) or re.match(r"(s3|gs|gcs|abfs|abfss)://", path):
        return path, ""
    return f"{folder}/{basename(path.replace(chr(92), '/').rstrip('/'))}", f"{path}, {BRING}"


_SEES = re.compile(
    r"(?<![a-z])(?:vlm?|llava|vision|intern-?vl|smolvlm|omni|ovis|pixtral|mplug|paligemma|idefics|molmo|janus|mllama|audio|minicpm-[vo]|cogvlm"
    r"|glm-?4(?:\.\d)?v|florence|emu3|textcaps|coco|vqa)(?![a-z])|(?:ocr|tts|asr)\b",
    re.IGNORECASE,
)
_PACKED = re.compile(r"[-_](gptq|awq|aqlm|bnb[-_](?:4bit|nf4)|int4|int8|fp8)\b", re.IGNORECASE)
_NO_DECODER = re.compile(
    r"(?:^|[/_-])(?:m?t5|ul2|bart|pegasus|opus-mt|nllb|\w*bert|roberta|deberta|electra|whisper|wav2vec2|hubert|clip|vit|blip2?|stable-diffusion"
    r"|diffusion\w*|llada|xlnet)(?:[/_-]|$)",
    re.IGNORECASE,
)
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_NEOX = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
_LINEAR = (
    (r"phi-?[34]", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    (r"glm-?4(?!\.[5-9])", (*_ATTENTION, "gate_up_proj", "down_proj")),
    (r"moe|-a\d+(\.\d+)?b|mixtral|gpt-?oss|deepseek-(v[23]|r1\b(?!-distill))|glm-4\.[5-9]|scout|maverick", _ATTENTION),
    (r"(^|/)(distil)?gpt-?2|cerebras-gpt|starcoder\b", ("c_attn", "c_proj", "c_fc")),
    (r"gpt-?j", ("q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out")),
    (r"phi-?(1|2)\b|phi-1_5", ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2")),
    (r"(^|/)mpt-", ("Wqkv", "out_proj", "up_proj", "down_proj")),
    (r"falcon-?\d+b|bloomz?\b|pythia|gpt-?neox", _NEOX),
    ("", (*_ATTENTION, "gate_proj", "up_proj", "down_proj")),
)
"""Names of models → their linear layers; the experts of mixtures aren't linear layers (lora.targetParameters)."""


def other_model(name: str) -> str | None:
    """Return what keeps a model from being trained here, as far as its name tells."""
    if packed := _PACKED.search(name):
        return f"a model that is quantized already ({packed[1]})"
    return "a model that isn't a decoder alone" if _NO_DECODER.search(name) else None


def sees(value: Any) -> bool:
    """Tell names of a model, of a template or of data sets that are for more than text."""
    names = value if isinstance(value, list) else str(value).split()
    return any(_SEES.search(basename(str(name).rstrip("/")).replace("_", "-")) for name in names)


def linear_layers(model: str) -> tuple[str, ...]:
    """Return the names of all linear layers of a model, by its name."""
    return next(layers for pattern, layers in _LINEAR if re.search(pattern, model, re.IGNORECASE))


def _words(value: Any, between: str | None = None) -> list[str]:
    return [str(one).strip() for one in (value if isinstance(value, list) else str(value).split(between)) if str(one).strip()]


class DataSets:
    """The data sets that a tool's file names. Raises ConfigError for data of another training, and for a list of them that isn't there."""

    def __init__(self, tool: OtherTool, leaves: Sequence[Leaf], source: str, beside: Beside, leave: Callable[[Leaf, str], None]) -> None:
        self.tool, self.leaves, self.source, self.beside, self.leave = tool, leaves, source, beside, leave
        self.by_path = {leaf.path: leaf for leaf in leaves if leaf.value is not None}
        self.consumed: set[str] = set()
        """Paths of the values that became sources."""
        found = {key: list(self._listed(key)) for key in tool.lists}
        for key in tool.datasets:
            if key in self.by_path:
                found[key] = [*found.get(key, []), *self._named(self.by_path[key])]
                self.consumed |= {key, "max_samples"}
        if tool.name == "TRL":
            found |= self._mixed()
        is_held = {key: key.startswith(("eval", "val", "test")) for key in found}
        self.held = [one for key, each in found.items() if is_held[key] for one in each]
        """Sources to evaluate."""
        self.train = [one for key, each in found.items() if not is_held[key] for one in each]

    def _value(self, key: str, otherwise: Any = None) -> Any:
        return self.by_path[key].value if key in self.by_path else otherwise

    def _listed(self, key: str) -> Iterator[Source]:
        """Yield the entries of a list (Axolotl, TRL, alignment-handbook); what they say besides is left, with its reason."""
        entries: dict[str, dict[str, Leaf]] = {}
        for leaf in self.leaves:
            if match := re.fullmatch(rf"({re.escape(key)}(?:\[\d+\])?)\.([^\[]+?)(\[\d+\])?(\..*)?", leaf.path):
                entries.setdefault(match[1], {})[match[2] + (match[4] or "")] = leaf
                self.consumed.add(leaf.path)
        for entry in entries.values():
            yield from self._entry({name: leaf for name, leaf in entry.items() if leaf.value is not None})

    def _entry(self, entry: Mapping[str, Leaf]) -> Iterator[Source]:
        text = {key: str(leaf.value) for key, leaf in entry.items()}
        columns = entry["columns"].value if "columns" in entry else ()
        if re.search(_PREFERENCES, text.get("type", "")) or any("chosen" in word for word in (*columns, *entry)):
            raise self.tool.refusal(next(iter(entry.values())), self.source, keys.PREFERENCES)
        if "images" in columns:
            raise self.tool.refusal(entry["columns"], self.source, keys.PICTURES)
        for key, leaf in entry.items():
            if key not in _OWN:
                self.leave(leaf, COLUMNS if any(word in key for word in ("field", "column", "mapping")) else BY_KEYS)
        named, files = entry.get("path", entry.get("id")), entry.get("data_files")
        if named is None:
            return
        weight = spelled(float(text["weight"])) if float(text.get("weight", 1)) != 1 else None
        config, at = text.get("name", text.get("config")), str(named.value)
        source = Source(named, at, config, text.get("split"), text.get("revision"), weight, text.get("type") == "pretrain")
        if files is not None and (at in _BUILDERS or is_file(at)):
            folder = "" if at in _BUILDERS else at
            paths = files.value if isinstance(files.value, list) else [files.value]
            yield from (replace(source, leaf=files, at=join(folder, str(path))) for path in paths)
            return
        if files is not None:
            self.leave(files, "all files of a split are read: config and split choose among those of a data set of the hub")
        yield source

    def _named(self, leaf: Leaf) -> Iterator[Source]:
        count = self._value("max_samples")
        registry = f"{str(self._value('dataset_dir', 'data')).rstrip('/')}/dataset_info.json"
        names = _words(leaf.value, ",")
        are_of_hub = all("/" in name for name in names) and self.beside(registry) is None  # as relatives of LLaMA-Factory take them
        if self.tool.name == "ms-swift":
            yield from self._drawn(leaf)
        elif self.tool.name == "LLaMA-Factory" and self._value("dataset_dir") != "ONLINE" and not are_of_hub:
            yield from self._registered(leaf, registry, names)
        else:
            yield from (Source(leaf, name, split=f"train[:{count}]" if count else None) for name in names)

    def _drawn(self, leaf: Leaf) -> Iterator[Source]:
        """Yield the data sets of ms-swift: files, or `[HF::]name[:config][#samples]`."""
        is_modelscope = str(self._value("use_hf")).lower() not in ("true", "1")
        for word in _words(leaf.value):
            hub, rest = ("", word) if word[2:4] != "::" else (word[:2], word[4:])
            named, _, count = rest.partition("#")
            at, _, config = named.partition(":") if not is_file(named) else (named, "", "")
            if "$" in at.rpartition("/")[2]:
                raise ConfigError(f"{self.source}:{leaf.line}: {leaf.path}: {at}: {UNSET}: write it out")
            note = f"the first {count} samples: ms-swift draws as many" if count else ""
            if not is_file(at) and (hub == "MS" or (is_modelscope and not hub)):
                note += f"{'; ' if note else ''}ms-swift asks ModelScope, Lockstep the Hugging Face hub: see that it has the same {at}"
            yield Source(leaf, at, config or None, f"train[:{count}]" if count else None, note=note)

    def _mixed(self) -> dict[str, list[Source]]:
        """Return the data sets of a mapping, or of a list, of names and shares (alignment-handbook, open-instruct), with the configuration
        of each. A share above 1 is a number of samples.
        """
        splits = _words(self._value("dataset_splits", []))
        train, test = (next((one for one in splits if one.startswith(part)), None) for part in ("train", "test"))
        mixer = [(leaf, leaf.path.partition(".")[2], leaf.value) for leaf in self.leaves if leaf.path.startswith("dataset_mixer.")]
        if listed := self.by_path.get("dataset_mixer_list"):
            words = _words(listed.value)
            mixer += [(listed, name, share) for name, share in zip(words[::2], words[1::2], strict=False)]
        sources = []
        configs = _words(self._value("dataset_configs", []))[: len(mixer)]
        for (leaf, name, share), config in zip_longest(mixer, configs):
            count = float(share)
            split = f"{train or 'train'}[:{int(count)}]" if count > 1 else train
            sources.append(Source(leaf, name, config, split, weight=spelled(count) if count < 1 else None))
        self.consumed |= {leaf.path for leaf in self.leaves if leaf.path.startswith(("dataset_mixer", "dataset_splits", "dataset_configs"))}
        is_evaluated = str(self._value("eval_strategy", self._value("evaluation_strategy"))).lower() in ("steps", "epoch")
        return {"mixer": sources, "test": [replace(one, split=test, weight=None) for one in sources] if test and is_evaluated else []}

    def _registered(self, leaf: Leaf, path: str, wanted: Sequence[str]) -> Iterator[Source]:
        """Yield the data sets of LLaMA-Factory: entries of dataset_info.json at `path`."""
        text, where = self.beside(path), f"{self.source}:{leaf.line}: {leaf.path}: {leaf.value}"
        if not text:
            raise ConfigError(
                f"{where}: names entries of {path}, which is neither beside {self.source} nor in this folder: put it there, or name the"
                f" data itself: dataset_path: /datasets/{re.sub('[^A-Za-z0-9._-]', '-', wanted[0])}.json"
            )
        try:
            known = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path}: is not valid JSON: {error}") from None
        for name in wanted:
            entry = known.get(name) if isinstance(known, dict) else None
            if not isinstance(entry, dict):
                raise ConfigError(f"{where}: {path} has no entry {name}: it has {', '.join(list(known)[:12])}")
            yield self._of_entry(leaf, entry, name, path)

    def _of_entry(self, leaf: Leaf, entry: Mapping[str, Any], name: str, path: str) -> Source:
        columns = entry.get("columns") or {}
        if entry.get("ranking") or columns.keys() & {"chosen", "rejected", "kto_tag"} or entry.get("converter") == "pair":
            raise self.tool.refusal(leaf, self.source, f"training on preferences ({name} in {path})")
        if media := columns.keys() & {"images", "videos", "audios"}:
            raise self.tool.refusal(leaf, self.source, f"training on {', '.join(sorted(media))} ({name} in {path})")
        at = next((entry[key] for key in _HUBS if entry.get(key)), join(path.rpartition("/")[0], str(entry.get("file_name"))))
        limit, split = entry.get("num_samples") or entry.get("size") or self._value("max_samples"), entry.get("split")
        others = [f"{key}: {value}" for key, value in columns.items() if value not in _READ.get(key, ())]
        return Source(
            leaf,
            str(at),
            entry.get("subset"),
            f"{split or 'train'}[:{limit}]" if limit else split,
            note=f"{name} in {path}" + (f"; its columns {', '.join(others)}: {COLUMNS}" if others else ""),
            is_text=self._value("stage") == "pt" or (columns.get("prompt") == "text" and "response" not in columns),
        )
