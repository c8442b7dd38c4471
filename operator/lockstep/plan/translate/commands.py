"""A command line of another tool in a shell script, such as `swift sft --model …`, as the values that a file of that tool would have."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from posixpath import basename

from lockstep.api.errors import ConfigError
from lockstep.api.files.yamlnodes import plain_value
from lockstep.plan.translate.leaves import Leaf
from lockstep.plan.translate.readers import UNSET

PROGRAMS = {"swift": "ms-swift", "megatron": "ms-swift", "llamafactory-cli": "LLaMA-Factory", "axolotl": "Axolotl", "trl": "TRL"}
"""Command → its tool."""
_SCRIPTS = (
    (r"(?:swift[/.]cli[/._]|(?:^|/)llm_)(?P<action>\w+?)(?:\.py)?$", "swift"),
    (r"(?:src/train|train_bash|llamafactory/launcher)\.py$", "llamafactory-cli"),
    (r"axolotl\.cli\.train|scripts/finetune\.py$", "axolotl"),
    (r"(?:^|/)(?:run_)?(?P<action>sft)(?:_\w+)?\.py$", "trl"),
    (
        r"(?:^|[/_-])(?P<action>online_dpo|dpo|grpo|kto|orpo|ppo|rloo|gkd|reward_modeling|reward|cpo|classification|classifier|glue"
        r"|embeddings?|reranker|rerank)(?:[_-][\w-]+)?\.py$",
        "trl",
    ),
    (r"(?:^|/)(?P<action>eval|infer|predict|generate|merge|export|judge|test)\w*\.py$", "launcher"),
    (r"(?P<action>[^/]*)$", "launcher"),
)
"""Form of a script's path or module → command that does the same; the last: a script of one's own."""
_BEFORE = ("nohup", "srun", "time", "exec", "sudo", "env", "uv", "run", "set", "export", "poetry", "then", "else", "do")
_LAUNCHERS = ("python", "python3", "torchrun", "deepspeed", "accelerate", "ds")
_LAUNCHING = ("torch.distributed.", "accelerate.commands.", "deepspeed.")
_SETTINGS = (".yaml", ".yml", ".json")
_ENDS = ("&&", "||", ";", "|", "&", ">", ">>", "2>&1", "2>")
_OTHERS = ("infer", "export", "deploy", "eval", "app", "sample", "rollout", "chat", "api", "webchat", "vllm-serve", "merge-lora", "predict",
           "generate", "merge", "judge", "test")  # fmt: skip
"""Actions of the tools' commands that train nothing."""
_OPENING, _CLOSING = ("if", "case", "for", "while", "until"), ("fi", "esac", "done")
Words = list[tuple[str, int]]
"""Words with their lines."""


CommandLine = tuple[str | None, list[Leaf]]
"""A training as it is typed: its tool (None: a script of one's own), and its values, with the command first."""


def command_line(text: str, source: str) -> CommandLine | None:
    """Return the training that a shell script starts; None for text that is none.

    Raises ConfigError where there are several, or where a file has the settings.
    """
    first = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    if re.match(r"\s*([\w./-]+|\"[^\"]*\"):(\s|$)|\s*[{\[-]|---", first):
        return None
    lines = [line for words in _commands(text) if (line := _trained(words, source)) is not None]
    lines = [line for line in lines if line[0] is not None] or lines
    lines = [line for line in lines if line[1][0].value not in _OTHERS] or lines
    if any(_options_of(line) != _options_of(lines[0]) for line in lines):
        places = ", ".join(str(leaves[0].line) for _, leaves in lines)
        raise ConfigError(f"{source}: starts {len(lines)} trainings, in lines {places}: put one of them into a file of its own")
    if not lines and text.startswith("#!"):
        raise ConfigError(
            f"{source}: is a script that starts no training by a command that is known: {', '.join(PROGRAMS)}, or a Python file"
        )
    return lines[0] if lines else None


def _options_of(line: CommandLine) -> list[tuple[str, str]]:
    """Return options, which are the same on every node."""
    return [(leaf.path, str(leaf.value)) for leaf in line[1] if leaf.path.islower() and leaf.path not in ("launcher", "node_rank")]


class _Variables:
    """Variables and arrays of a script, as far as it sets them once for all."""

    def __init__(self) -> None:
        self.known: dict[str, Words] = {}
        self.unclear: set[str] = set()
        self.depth = 0
        """Conditions and loops around the line."""

    def assign(self, name: str, words: Words, *, adds: bool) -> None:
        """Take in an assignment. What a condition or a program sets, or another line sets otherwise, has no value that is known."""
        new = [*(self.known.get(name, []) if adds else []), *words]
        is_other = not adds and [word for word, _ in self.known.get(name, new)] != [word for word, _ in new]
        if self.depth > 0 or is_other or any("$(" in word or "`" in word for word, _ in new):
            self.unclear.add(name)
        self.known[name] = new

    def expand(self, word: str, line: int) -> Words:
        """Return what a word stands for: several words for an array, and for a variable of options."""
        array = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", word)
        if array is not None:
            return self.known[array[1]] if array[1] in self.known and array[1] not in self.unclear else [(word, line)]
        text = re.sub(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))", self._value, word)
        are_options = word.startswith("$") and text.lstrip().startswith("--")
        return [(one, line) for one in (text.split() if are_options else [text])]

    def _value(self, match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        if name in self.unclear or name not in self.known:
            return default if default is not None and name not in self.unclear else match[0]
        return " ".join(word for word, _ in self.known[name])


def _commands(text: str) -> Iterator[Words]:
    """Yield the words of each command, with the values of variables."""
    variables = _Variables()
    command: Words = []
    held, start = "", 1
    for number, line in enumerate([*text.splitlines(), ""], 1):
        held, start = (f"{held}\n{line}", start) if held else (line, number)
        goes_on = held.endswith("\\")
        array = re.match(r"\s*(?:local\s+|declare\s+-\w+\s+)?(\w+)(\+?)=\((?:(.*)\)\s*;?\s*(?:#.*)?$)?", held, re.DOTALL)
        try:
            words = _split(array[3] or "" if array else held.removesuffix("\\"))
        except ValueError:
            continue  # a quote that a later line closes
        if array and array[3] is None:
            continue  # as is the array
        held = ""
        if array:
            variables.assign(array[1], [one for word in words for one in variables.expand(word, start)], adds=bool(array[2]))
            continue
        is_within = goes_on or (bool(command) and not words and line.lstrip().startswith("#"))
        for word in [*words, *([] if is_within else [";"])]:
            if word not in _ENDS:
                command += variables.expand(word.removesuffix(";"), start)
            if word in _ENDS or word.endswith(";"):
                _assign(variables, command)
                yield command
                command = []


def _split(text: str) -> list[str]:
    """Return the words of a text; a # within a word begins no comment, though it does for shlex."""
    words = shlex.split(re.sub(r"(?<=\S)#", "\0", text), comments=True)
    return [word.replace("\0", "#") for word in words]


def _assign(variables: _Variables, command: Words) -> None:
    variables.depth += sum(word in _OPENING for word, _ in command[:2]) - sum(word in _CLOSING for word, _ in command[:1])
    for word, line in command:
        if pair := re.fullmatch(r"([A-Za-z_]\w*)(\+?)=(.*)", word, re.DOTALL):
            variables.assign(pair[1], [(pair[3], line)], adds=bool(pair[2]))
        elif word not in _BEFORE:
            return


def _trained(words: Words, source: str) -> CommandLine | None:
    """Read one command; None if it is none of a tool."""
    leaves, rest = [], list(words)
    while rest and ((pair := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", rest[0][0], re.DOTALL)) or rest[0][0] in _BEFORE):
        leaves += [Leaf(pair[1], _plain(pair[2]), rest[0][1])] if pair else []
        rest.pop(0)
    if not rest:
        return None
    line = rest[0][1]
    rest[:1] = [(word, line) for word in rest[0][0].split()]  # a variable may hold several words
    if not rest or rest[0][0].endswith(".py"):
        rest.insert(0, ("python", line))
    program = basename(rest.pop(0)[0])
    if program in _LAUNCHERS or program.startswith("$"):
        scripts = [n for n, (word, _) in enumerate(rest) if word.endswith(".py") or (n and rest[n - 1][0] in ("-m", "--module"))]
        at = next((n for n in scripts if not rest[n][0].startswith(_LAUNCHING)), None)
        if at is None:
            return None
        leaves.append(Leaf("launcher", " ".join([program, *(word for word, _ in rest[: at + 1])]), line))
        script, program = next((match, command) for form, command in _SCRIPTS if (match := re.search(form, rest[at][0])))
        action = script.groupdict().get("action") or basename(rest[at][0])
        rest = rest[at + 1 :]
    elif program in PROGRAMS and rest:
        action = rest.pop(0)[0]
    else:
        return None
    for word, number in rest:
        if word.isspace():
            raise ConfigError(f"{source}:{number}: a space follows the backslash, and the shell ends the command there: take it away")
        if word.endswith(("[@]}", "[*]}")):
            raise ConfigError(f"{source}:{number}: {word}: {UNSET}: write its words out")
    options = list(_options(rest))
    for leaf in options if action not in _OTHERS else ():
        file = str(leaf.value[0] if isinstance(leaf.value, list) else leaf.value)
        is_computed = file.startswith("$") and (leaf.path or action == "train")
        if leaf.path in ("", "config", "config_file") and (file.endswith(_SETTINGS) or is_computed):
            raise ConfigError(f"{source}:{leaf.line}: starts a training whose settings are in {file}: give --from that file")
    head = Leaf(program.replace("-", "_"), action, line)
    return PROGRAMS.get(program), [head, *leaves, *(leaf for leaf in options if leaf.path)]


def _plain(word: str) -> object:
    """Return a word as a YAML file would have it."""
    try:
        return plain_value(word)
    except ValueError:
        return word


def _options(words: Sequence[tuple[str, int]]) -> Iterator[Leaf]:
    """Yield each option with its value: true without one, a list with several."""
    key, line, values = "", words[0][1] if words else 1, list[object]()
    for word, number in [*words, ("--", 0)]:
        if setting := re.fullmatch(r"\+*([A-Za-z_][\w.]*)=(.*)", word, re.DOTALL):  # as hydra and omegaconf take them
            yield Leaf(setting[1], _plain(setting[2]), number)
            continue
        if not re.match(r"--?[A-Za-z]|--$", word):
            values.append(_plain(word))
            continue
        if key or values:
            yield Leaf(key, True if not values else values[0] if len(values) == 1 else values, line)
        name, mark, value = word.lstrip("-").partition("=")
        key, line, values = name.replace("-", "_"), number, [_plain(value)] if mark else []
