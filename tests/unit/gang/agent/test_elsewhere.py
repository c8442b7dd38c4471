"""Where a file or package is that a rank didn't find, and the fields that lead there."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep_gang.agent.ranks.script import file_elsewhere
from unit.gang.cases import make_run

NO_CONF = "FileNotFoundError: [Errno 2] No such file or directory: 'conf.py'"
NO_DATA = 'OSError: FileNotFoundError("data/a b.json") not loaded'
NO_PACKAGE = "ModuleNotFoundError: No module named 'tool.train'"
SHOUT = "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/conf.py'"
BESIDE = "conf.py is in {ws}/repo/sub, not in {ws}, where ranks work: state script.folder: /workspace/repo/sub, script.path: train.py"
ABOVE = "conf.py is in {ws}/repo, not in {ws}/repo/sub, where ranks work: state script.folder: /workspace/repo, script.path: sub/train.py"
APART = "conf.py is in {ws}/repo, not in {ws}/repo/sub, where ranks work: state script.folder: /workspace/repo"
PACKAGE = "tool is in {ws}/repo, where Python doesn't search: state script.folder: /workspace/repo, script.module: sub.train"
SCRIPT, ABSOLUTE, MODULE = ("python3", "repo/sub/train.py"), ("python3", "{ws}/repo/sub/train.py"), ("python3", "-m", "train")


@pytest.mark.parametrize(
    ("command", "folder", "there", "line", "words"),
    [
        (SCRIPT, "", "repo/sub/conf.py", NO_CONF, BESIDE),
        (ABSOLUTE, "", "repo/sub/conf.py", NO_CONF, BESIDE),
        (ABSOLUTE, "repo/sub", "repo/conf.py", NO_CONF, ABOVE),
        (MODULE, "repo/sub", "repo/conf.py", NO_CONF, APART),
        (ABSOLUTE, "repo/sub", "repo/data/a b.json", NO_DATA, ABOVE.replace("conf.py", "data/a b.json")),
        (ABSOLUTE, "repo/sub", "repo/tool/train.py", NO_PACKAGE, PACKAGE),
        (SCRIPT, "", "repo/tool.py", NO_PACKAGE, PACKAGE),
        (SCRIPT, "", "conf.py", NO_CONF, ""),  # the script changed its folder
        (SCRIPT, "", "repo/other/conf.py", NO_CONF, ""),
        (SCRIPT, "", "repo/sub/tool/a.py", NO_PACKAGE, ""),  # Python searched there
        (SCRIPT, "", "repo/sub/conf.py", SHOUT, ""),
        (SCRIPT, "", "repo/sub/conf.py", "ValueError: conf.py", ""),
    ],
)
def test_a_file_that_lies_beside_the_script_or_above_is_named_with_the_fields(
    tmp_path: Path, command: tuple[str, ...], folder: str, there: str, line: str, words: str
) -> None:
    for name in ("repo/sub/train.py", there):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    typed = tuple(word.format(ws=tmp_path) for word in command)
    run = make_run(command=typed, working_directory=str(tmp_path / folder), run_dir=str(tmp_path / "runs/x"))
    assert file_elsewhere(run, ("warming up", line)) == words.format(ws=tmp_path)
