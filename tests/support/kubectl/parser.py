"""A kubectl or oc that says which lines it doesn't understand."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from support.checkout import ROOT
from support.kubectl.lines import A_VALUE, CUT, Line

DRY = {
    "add-role-to-group", "add-scc-to-user", "annotate", "apply", "cordon", "create", "delete", "drain", "label", "patch", "scale",
        "uncordon",
}  # fmt: skip
"""Commands that have --dry-run=client."""
OF_KINDS = {"annotate", "delete", "describe", "edit", "get", "label", "patch", "scale"}
"""Commands whose first word is a kind of object."""
OBJECT = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\n"
FILES = (
    "FILE", "x", "job.yaml", "first.yaml", "mine.yaml", ".lockstep/deploy/mine/definitions.yaml", ".lockstep/deploy/mine/cluster.yaml",
    "crds.yaml", "install.yaml", "bundle/before-olm-openshift.yaml",
)  # fmt: skip
"""Files that lines name, besides those of the checkout."""
UNDERSTOOD = re.compile(r"127\.0\.0\.1:1\b.*refused|\bforbidden: User \"a-person\" cannot |^error: build x/x not found$", re.MULTILINE)
"""How a command ends that was understood; `oc cancel-build` doesn't say that it reached no API server."""
OTHERS = (A_VALUE, "build", "localqueue", "net-attach-def", "network-attachment-definition", "scc", "workloads")
"""Kinds that are a value of the text, and those of OpenShift, Kueue and Multus, which the embedded cluster doesn't have."""
NOWHERE = {"server": "https://127.0.0.1:1", "insecure-skip-tls-verify": True}
Object = dict[str, Any]


@dataclass(frozen=True)
class Parser:
    """A kubectl or oc that judges lines. It changes nothing: it reaches no API server, or one where it may do nothing.

    So all that it understands ends with a refusal; what ends otherwise, with another word, is not understood.
    """

    program: tuple[str, ...]
    folder: Path
    """Where it runs: an empty folder."""
    kubeconfig: Path | None = None
    """An administrator's, of the API server; its lines then come from a person without rights. Without it, there is none."""

    def complaints(self, lines: Sequence[Line]) -> list[str]:
        """What is wrong with them. A line is typed once, however many places have it."""
        self._prepare()
        once = sorted({(line.text, line.is_named) for line in lines})
        with ThreadPoolExecutor(4) as pool:
            wrong = dict(zip(once, pool.map(lambda line: self._complaint(*line), once), strict=True))
        return [f"{line.place}: {line.text}: {why}" for line in lines if (why := wrong[line.text, line.is_named])]

    def _prepare(self) -> None:
        given: Object = yaml.safe_load(self.kubeconfig.read_text()) if self.kubeconfig else {}
        cluster: Object = given["clusters"][0]["cluster"] if given else NOWHERE
        user: Object = given["users"][0]["user"] if given else {"token": "x"}
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "x", "clusters": [{"name": "x", "cluster": cluster}],
            "users": [{"name": "x", "user": {**user, "as": "a-person"}}],
                "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        }  # fmt: skip
        (self.folder / "kubeconfig").write_text(yaml.safe_dump(config))
        (self.folder / "manifests").symlink_to(ROOT / "manifests")
        for name in FILES:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(OBJECT)

    def _complaint(self, text: str, is_named: bool) -> str:
        """Type a line; '' if it was understood, or if it names a command and options that there are, and may do only that."""
        words, is_cut = _words(text), text.endswith(CUT)
        done = self.run(*_dry(words))
        said = done.stdout + done.stderr
        lacking = re.search(r"doesn't have a resource type \"([^\"]+)\"", said)
        if UNDERSTOOD.search(said) or (lacking and lacking[1] in OTHERS) or (done.returncode == 0 and "\nUsage:\n" not in said):
            return ""
        return "" if (is_named or is_cut) and self._has(words, is_cut=is_cut) else said.strip()

    def _has(self, words: list[str], *, is_cut: bool) -> bool:
        """Whether there is such a command with such options; a line that is cut may have more words."""
        names = _names(words)
        text = self.run(*names, "--help").stdout
        path = _names(text.partition("\nUsage:\n")[2].split()[1:])
        is_whole = names == path and (len(words) == len(names) or words[len(names)].startswith("-"))
        if not path or names[: len(path)] != path or not (is_whole or is_cut):
            return False
        if not _unknown(words, text):
            return True
        done = self.run("options")
        return not _unknown(words, text + done.stdout + done.stderr)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Type these words; plugins are those of the Python that runs the tests."""
        path = f"{sys.prefix}/bin:{os.environ['PATH']}"
        environment = {"HOME": str(self.folder), "KUBECONFIG": str(self.folder / "kubeconfig"), "PATH": path}
        return subprocess.run(
            [*self.program, *words], cwd=self.folder, env=environment, input=OBJECT, capture_output=True, text=True, check=False, timeout=60
        )


def different(lines: Iterable[Line]) -> Iterator[Line]:
    """The lines that differ from all before them in more than names and values: in the command, its options, the number of words, or a
    kind.
    """
    known: set[tuple[str, ...]] = set()
    for line in sorted(lines, key=lambda line: line.is_named):  # (of two alike, what must be whole)
        words = list(itertools.takewhile(lambda word: word != "--", _words(line.text)))
        command = words[:3] if words[0] == "create" else words[:1]
        kinds = re.split("[,/]", words[1]) if words[0] in OF_KINDS and len(words) > 1 else ()
        features = {(*command, *sorted(_options(words)), str(len(words))), *(("", kind) for kind in kinds)}
        if not features <= known:
            known |= features
            yield line


def _words(text: str) -> list[str]:
    """The words after `kubectl` or `oc`, with a file's name in place of a program that prints one."""
    return shlex.split(re.sub(r"\$\([^)]*kubeconfig\)", "kubeconfig", text.removesuffix(CUT)))[1:]


def _names(words: Sequence[str]) -> list[str]:
    """Words at the beginning that can be a command's name."""
    return list(itertools.takewhile(lambda word: re.fullmatch(r"[a-z][a-z-]*", word), words))


def _unknown(words: Sequence[str], text: str) -> list[str]:
    """The options among the words that a help text doesn't have."""
    return [name for name in _options(words) if not re.search(rf"[ ,]{name}[=,]", text)]


def _options(words: Sequence[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("-") and word != "-"]


def _dry(words: list[str]) -> list[str]:
    """The words with the option that changes nothing, where the command has it."""
    has_it = DRY & {words[0], *(words[:2] if words[0] in ("adm", "policy") else ())}
    return words if not has_it or words[:2] == ["create", "token"] or "--server-side" in words else [*words, "--dry-run=client"]
