"""Cores that a process may use, by its affinity and the limits of its control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep_machine.limits import usable_cores

UNIT = "user.slice/user-1000.slice/lockstep-x.service"


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/\n", {}, 16),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 16),
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/\n", {"cpu.max": "6400000 100000\n"}, 16),
        ("", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 16),
        ("", {"cpu/cpu.cfs_quota_us": "350000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3.5),
        (f"0::/{UNIT}\n", {f"{UNIT}/cpu.max": "max 100000\n", "user.slice/cpu.max": "200000 100000\n"}, 2),
        (f"3:cpu,cpuacct:/{UNIT}\n", {f"cpu/{UNIT}/cpu.cfs_quota_us": "600000\n", f"cpu/{UNIT}/cpu.cfs_period_us": "100000\n"}, 6),
    ],
)
def test_the_least_limit_of_all_groups_around_a_process_says_how_many_cores_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: dict[str, str], cores: float
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    for path, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert usable_cores(tmp_path) == cores
