"""Cuts the power at every call of a save, Lockstep's and others', and prints what the next start would find; root:

python tests/bench/power_loss.py            a table
python tests/bench/power_loss.py --json     {"results": [{"name": …, "points": …, "verdicts": {…}, "notes": […]}, …]}
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
sys.path[:0] = [str(ROOT / folder) for folder in ("workspace", "tests", "tests/train/ranks")]
os.environ.update(ENVIRONMENT)

from faults.cut_lockstep import EXIT_NO_DISK, lockstep_subjects, say  # noqa: E402
from faults.disk import NoLoopDisk, hide_mounts  # noqa: E402
from faults.power_cut import OTHERWISE, Findings, print_json, try_every_point  # noqa: E402


def table(found: list[Findings]) -> str:
    """Markdown; a row for each saver and variant."""
    columns = ("old", "new", *OTHERWISE)
    lines = [f"| saver | variant | points | {' | '.join(columns)} | after the save returned |", f"|---|---|---{'|---' * len(columns)}|---|"]
    for findings in found:
        for variant, counts in findings.verdicts.items():
            cells = " | ".join(str(counts.get(column, 0)) for column in columns)
            lines.append(
                f"| {findings.name} | {variant} | {sum(counts.values())} | {cells} | {findings.returned[variant].partition(':')[0]} |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Cut the power at every call of a save; root.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="subjects whose names hold this text")
    options = parser.parse_args()
    try:
        hide_mounts()
    except NoLoopDisk as error:
        say(f"the power can't be cut here: {error}")
        return EXIT_NO_DISK
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subjects = lockstep_subjects(folder)
        from faults import peer_saves

        chosen = [subject for subject in [*subjects, *peer_saves.peers()] if options.only in subject.name]
        found = [try_every_point(subject, folder, say) for subject in chosen]
    if options.json:
        print_json(found)
    else:
        print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
