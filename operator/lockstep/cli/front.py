"""The front page: what `lockstep --help` prints, which fits one screen."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.cli.verbs import GROUPS

SENTENCE = "Fine-tune with DeepSpeed on the nodes of your own cluster, or your own hosts."
OPTIONS = {
    "lockstep VERB --help": "what a verb takes, with an example",
    "lockstep help TOPIC": "cluster-files, job-files, exit-codes, words",
    "--version": "print the version",
    "--install-completion": "complete verbs and names in this shell",
}


def front_page(day: Mapping[str, str]) -> str:
    """`day`: help texts of the verbs that have a line of their own."""
    lines = ["Usage: lockstep [OPTIONS] VERB [ARGS]...", "", SENTENCE, "", "Every day:"]
    lines += _table({verb: text.strip().partition("\n")[0] for verb, text in day.items()})
    lines += ["", "And also:", *_table({group: ", ".join(verbs) for group, verbs in GROUPS.items()})]
    lines += ["", "More:", *_table(OPTIONS)]
    return "\n".join(lines) + "\n"


def _table(rows: Mapping[str, str]) -> list[str]:
    width = max(map(len, rows), default=0)
    return [f"  {name:{width}}  {text}" for name, text in rows.items()]
