"""Data sets that other tools' files name, as sources of samples: of the hub, or files to bring."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from posixpath import basename, join
from typing import Any

from lockstep.api.errors import ConfigError
from lockstep.api.model import spelled
from lockstep.api.names import DATASETS, WORKSPACE
from lockstep.plan.translate import keys
from lockstep.plan.translate.leaves import Leaf
from lockstep.plan.translate.readers import DIFFERS, UNSET, Beside, OtherTool
from lockstep_spec.choices import ROW_KEYS

BRING = "which only /workspace and /datasets can hold: lockstep cp brings it"
BY_KEYS = "rows are read by their keys and rendered by the tokenizer's chat template: lockstep run --preview 3 shows them"
_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".feather", ".csv", ".tsv", ".txt", ".gz", ".zst", ".bz2", ".xz")
_FOLDERS = (
    "models", "model", "checkpoints", "checkpoint", "ckpt", "ckpts", "output", "outputs", "saves", "data", "dataset", "datasets",
    "pretrained", "weights", "results", "runs",
)  # fmt: skip
"""First parts of relative paths, which no organization of the hub has as its name."""
_OWN = ("path", "id", "name", "config", "split", "revision", "weight", "data_files", "shards", "fraction", "skip", "ds_type", "columns")
"""Properties of a data set in a list that become fields."""
_HUBS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "path")
_COLUMNS = {
    "field": "text", "field_messages": "messages", "field_instruction": "instruction", "field_input": "input", "field_output": "output",
    "field_system": "system", "field_tools": "tools", "query": "input", "response": "output", "text_column": "text",
    **{key: key for key in ROW_KEYS},
}  # fmt: skip
"""Name of a column in other tools' lists of data sets → Lockstep's."""
_READ = {
    **dict.fromkeys(("message_field_role", "role", "role_tag"), ("role", "from")), "type": ("chat_template", "completion", "pretrain"),
    **dict.fromkeys(("message_field_content", "content", "content_tag"), ("content", "value")),
}  # fmt: skip
"""Key → values that say what is read anyway."""
_TAGS = ("from", "value", "role", "content", "human", "gpt", "user", "assistant", "observation", "tool", "function_call", "function",
         "system")  # fmt: skip
"""Names of keys and roles that are read in any case."""
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
    columns: Mapping[str, str] = field(default_factory=dict)
    """Lockstep's key → the column of another name."""

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
            "columns": dict(self.columns) or None,
            "weight": self.weight,
        }
        return {key: value for key, value in fields.items() if value is not None}, "; ".join(filter(None, (self.note, note)))


def columns_of(named: Mapping[str, Any]) -> dict[str, str]:
    """Return Lockstep's keys with the columns that have other names. `named`: another tool's name of a column → the column."""
    pairs = {_COLUMNS[key]: str(name) for key, name in named.items() if key in _COLUMNS and name}
    return {key: name for key, name in pairs.items() if key != name and {key, name} != {"messages", "conversations"}}


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
    r"(?<![a-z])(?:vlm?|llava|vision|intern-?vl|smolvlm|omni|ovis|pixtral|mplug|paligemma|idefics|molmo(?:e)?|janus(?!-hf)|mllama|audio|cogvlm"
    r"|minicpm(?:-llama3)?-[vo]|glm-?(?:4(?:\.\d)?|edge-)v|florence|emu3|textcaps|coco|vqa|multimodal|(?:internlm-)?xcomposer|cogagent|docowl|qvq"
    r"|ui-tars|mineru|autoglm|glyph|valley|moondream|fuyu|kosmos|nvila|bagel|openvla|voxtral|vla|smolvla|llavanext|video[\w-]*|image[\w-]*)"
    r"(?![a-z])|(?:ocr|tts|asr)\d*(?![a-z])",
    re.IGNORECASE,
)
_BOTH = re.compile(
    r"gemma-?(?:3(?!-1b|-270m)|[4-9](?![\d.]*b))|llama-?4|qwen3\.[5-9]|ministral-3|mistral-small-3\.[1-9]|kimi-k(?:2\.[5-9]|[3-9])|intern-s1|minimax-m3|mimo-v2\.5",
    re.IGNORECASE,
)
"""Models that see, too, and are trained on text as often."""
_TEXT = re.compile(
    r"(?<![a-z])(?:code)?(?:qwen(?!3\.)|llama-?[123]|vicuna|alpaca|tinyllama|mi[sx]tral|(?:mini|code|dev)stral|gemma-?2?|phi|deepseek|yi|internlm|baichuan|chatglm"
    r"|glm|falcon|olmo|smollm|gpt|granite|bloom|pythia|opt|starcoder|zephyr|solar|command|stablelm|hermes|kimi|minimax|exaone|polylm|skywork|mpt"
    r"|qwq|lfm2|nemotron|minicpm|ernie|hunyuan|seed|xverse|telechat|mamba|dbrx|cerebras|openchat|orca|wizard|sea-?l|phoenix|aya|apertus|bielik"
    r"|ling-|ring-|tongyi|megrez|grok|marco|mimo|yuan|codegeex|orion|ziya|longcat|bluelm|numina|hy3)",
    re.IGNORECASE,
)
_OTHER_MODELS = (
    (r"[-_](gptq|awq|aqlm|bnb[-_](?:4bit|nf4)|int4|int8|fp8|gguf)\b", "a model that is quantized already ({})"),
    (r"\.(?:pth|pt|ckpt|gguf|onnx|bin|safetensors)$", "a file of weights, and no model's folder"),
    (r"reward|(?:^|[/_-])(?:rm|prm\d*k?|orm)(?:[/_-]|$)", "a reward model"),
    (r"embed|rerank|(?:^|[/_-])(?:bge|gte|e5)[-_]|sentence-", "a model of embeddings"),
    (r"(?:^|[/_-])(?:m?t5|byt5|ul2|bart|pegasus|opus-mt|nllb|\w*bert|roberta|deberta|electra|whisper|wav2vec2|hubert|clip|vit|blip2?"
     r"|stable-diffusion|diffusion\w*|llada|dream|xlnet|esm2?|segformer|yolo\w*|detr)(?:[/_-]|$)", "a model that isn't a decoder alone"),
)  # fmt: skip
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
    return next((what.format(*match.groups()) for form, what in _OTHER_MODELS if (match := re.search(form, name, re.IGNORECASE))), None)


def sees(value: Any) -> bool:
    """Tell names of a model, of a template or of data sets that are for more than text."""
    names = value if isinstance(value, list) else str(value).split()
    return any(_SEES.search(basename(str(name).rstrip("/")).replace("_", "-")) for name in names)


def assumed_of_model(name: str) -> str | None:
    """Return what a translation assumes of a model that its name doesn't tell."""
    base = basename(name.rstrip("/"))
    if _BOTH.search(base) or sees(base):
        return f"all samples are text alone, though {base} sees or hears, too"
    return None if _TEXT.search(base) else f"{base} is a model of text (a decoder alone), which its name doesn't tell"


_ROWS = (
    (r'"(?:images?|videos?|audios?)"\s*:\s*(?:\[\s*)?"|<(?:image|video|audio)>', keys.PICTURES),
    (r'"(?:chosen|rejected|rejected_response|kto_tag)"\s*:', keys.PREFERENCES),
)
"""Form of rows → the training that they are for, where it isn't Lockstep's."""


def training_of_rows(text: str) -> str | None:
    """Return the training that rows are for, where it isn't Lockstep's."""
    return next((training for form, training in _ROWS if re.search(form, text)), None)


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
            if key in self.by_path and (named := [*self._named(self.by_path[key])]):
                found[key] = [*found.get(key, []), *named]
                self.consumed |= {key, "max_samples"}
        for leaf in leaves:
            row = keys.FIELDS.get(leaf.path.rpartition(".")[2])
            listed = _words(leaf.value) if isinstance(leaf.value, list) else []
            if listed and row is not None and row.field.endswith(("data.path", "data.name")):
                found[f"{row.field}: {leaf.path}"] = [Source(leaf, at) for at in listed]
                self.consumed.add(leaf.path)
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
        listed = _words(entry["columns"].value) if "columns" in entry else []
        if re.search(_PREFERENCES, text.get("type", "")) or any("chosen" in word for word in (*listed, *entry)):
            raise self.tool.refusal(next(iter(entry.values())), self.source, keys.PREFERENCES)
        if "images" in listed:
            raise self.tool.refusal(entry["columns"], self.source, keys.PICTURES)
        columns: dict[str, str] = {}
        for key, leaf in entry.items():
            last = key.rpartition(".")[2]
            if last in _COLUMNS and isinstance(leaf.value, str) and not key.startswith("roles"):
                columns |= columns_of({last: leaf.value})
            elif key not in _OWN and text[key] not in _READ.get(last, ()):
                is_prompt = key.startswith("type") or last in ("conversation", "format")
                reason = keys.NO_SETTING if is_prompt else keys.left_out(key, leaf.value)
                self.leave(leaf, (DIFFERS if is_prompt else "") + BY_KEYS if reason == keys.NO_SETTING else reason)
        named, files = entry.get("path", entry.get("id")), entry.get("data_files")
        if named is None:
            return
        weight = float(text.get("weight", text.get("fraction", 1))) / int(text.get("shards", 1))
        config, at = text.get("name", text.get("config")), str(named.value)
        split = text.get("split") or (f"train[{text['skip']}:]" if text.get("skip", "0") != "0" else None)
        share = spelled(weight) if weight != 1 else None
        source = Source(named, at, config, split, text.get("revision"), share, text.get("type") == "pretrain", columns=columns)
        if files is not None and (at in _BUILDERS or is_file(at)):
            folder = "" if at in _BUILDERS else at
            yield from (replace(source, leaf=files, at=join(folder, path)) for path in _words(files.value))
            return
        if files is not None:
            self.leave(files, "all files of a split are read: config and split choose among those of a data set of the hub")
        yield source

    def _named(self, leaf: Leaf) -> Iterator[Source]:
        count = self._value("max_samples")
        registry = f"{str(self._value('dataset_dir', 'data')).rstrip('/')}/dataset_info.json"
        names = _words(leaf.value, ",")
        if unset := next((name for name in names if "$" in name.rpartition("/")[2]), None):
            raise ConfigError(f"{self.source}:{leaf.line}: {leaf.path}: {unset}: {UNSET}: write it out")
        are_of_hub = all("/" in name for name in names) and self.beside(registry) is None  # as relatives of LLaMA-Factory take them
        if self.tool.name == "ms-swift":
            yield from self._drawn(leaf)
        elif self.tool.name == "LLaMA-Factory" and self._value("dataset_dir") != "ONLINE" and not are_of_hub:
            yield from self._registered(leaf, registry, names)
        else:
            yield from (Source(leaf, name, split=f"train[:{count}]" if count else None) for name in names)

    def _drawn(self, leaf: Leaf) -> Iterator[Source]:
        """Yield the data sets of ms-swift: files, or `[HF::]name[:config][#samples]`."""
        columns = self._swift_columns()
        is_modelscope = str(self._value("use_hf")).lower() not in ("true", "1")
        for word in _words(leaf.value):
            hub, rest = ("", word) if word[2:4] != "::" else (word[:2], word[4:])
            named, _, count = rest.partition("#")
            at, _, config = named.partition(":") if not is_file(named) else (named, "", "")
            note = f"the first {count} samples: ms-swift draws as many" if count else ""
            if not is_file(at) and (hub == "MS" or (is_modelscope and not hub)):
                note += f"{'; ' if note else ''}ms-swift asks ModelScope, Lockstep the Hugging Face hub: see that it has the same {at}"
            yield Source(leaf, at, config or None, f"train[:{count}]" if count else None, note=note, columns=columns)

    def _swift_columns(self) -> dict[str, str]:
        """Return the columns of ms-swift's `columns`, which has the data's names first. Raises ConfigError for another training's."""
        leaf = self.by_path.get("columns")
        mapped = {one.path.partition(".")[2]: one.value for one in self.leaves if one.path.startswith("columns.")}
        if leaf is not None:
            try:
                mapped = dict(json.loads(str(leaf.value)))
            except ValueError:
                self.leave(leaf, keys.left_out("columns"))
        self.consumed |= {"columns", *(f"columns.{name}" for name in mapped)}
        if other := training_of_rows(json.dumps({str(theirs): "." for theirs in mapped.values()})):
            raise self.tool.refusal(leaf or self.leaves[0], self.source, other)
        pairs = {"instruction" if theirs == "query" else theirs: name for name, theirs in mapped.items()}
        return columns_of(pairs)

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
        is_text = columns.get("prompt") == "text" and "response" not in columns
        mapped = {"instruction" if key == "prompt" else key: column for key, column in columns.items()}
        tags = [f"{key}: {value}" for key, value in (entry.get("tags") or {}).items() if value not in _TAGS]
        return Source(
            leaf,
            str(at),
            entry.get("subset"),
            f"{split or 'train'}[:{limit}]" if limit else split,
            note=f"{name} in {path}" + (f"; roles and contents are read by their usual names, not {', '.join(tags)}" if tags else ""),
            is_text=is_text or self._value("stage") == "pt",
            columns={} if is_text else columns_of(mapped),
        )
