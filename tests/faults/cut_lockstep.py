"""Every save of Lockstep's trainer through power cuts, as JSON; root:

OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu PYTHONPATH=workspace:tests:tests/train/ranks python tests/faults/cut_lockstep.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from faults.disk import NoLoopDisk, hide_mounts
from faults.power_cut import Subject, print_json, try_every_point

EXIT_NO_DISK = 3


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    folder = Path(sys.argv[1])
    try:
        hide_mounts()
    except NoLoopDisk as error:
        say(f"the power can't be cut here: {error}")
        return EXIT_NO_DISK
    print_json([try_every_point(subject, folder, say) for subject in lockstep_subjects(folder)])
    return 0


def lockstep_subjects(folder: Path) -> list[Subject]:
    """A save and a restart, with a model and data made in `folder`."""
    import rank_cases
    import rank_server

    from faults import lockstep_saves

    rank_server.preload()
    model, data, apart = folder / "model", folder / "data.jsonl", folder / "apart"
    apart.mkdir()
    rank_cases.make_model(str(model))
    data.write_text("".join(json.dumps({"text": f"sample {index}"}) + "\n" for index in range(20)))
    return [lockstep_saves.commits(model, data, apart, "Stage2"), lockstep_saves.starts(apart), lockstep_saves.volumes(model, data, apart)]


if __name__ == "__main__":
    sys.exit(main())
