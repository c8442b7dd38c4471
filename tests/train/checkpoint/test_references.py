"""The tests' store of reference runs: what is there is whole, and of this state of the trainer."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import references
from references import References


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))


def test_a_reference_is_made_once_for_each_description_and_never_half() -> None:
    made: list[Path] = []

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise ValueError("halfway")

    def make(folder: Path) -> None:
        assert list(folder.iterdir()) == []
        made.append(folder)

    with closing(References()) as store:
        with pytest.raises(ValueError, match="halfway"):
            store.get("run", {"steps": 1}, fail)
        first = store.get("run", {"steps": 1}, make)
        assert first.is_dir()
        assert store.get("run", {"steps": 1}, fail) == first
        assert store.get("run", {"steps": 2}, make) != first
    assert len(made) == 2


def test_references_of_another_cpu_kernel_or_package_are_others_and_the_fourth_goes_once_no_test_run_uses_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = []

    def surrounded() -> References:
        store = References()
        folders.append(store.get("run", {}, lambda part: None))
        return store

    with closing(surrounded()):
        monkeypatch.setattr(references, "cpu_flags", lambda: "others")
        surrounded().close()
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
        surrounded().close()
        monkeypatch.setattr(references, "version", lambda package: "0" if package == "peft" else "1")
        surrounded().close()
        assert all(folder.exists() for folder in folders)
    surrounded().close()
    assert [folder.exists() for folder in folders] == [False, True, True, True, True]
    assert len(set(folders)) == 4
    assert len(list((tmp_path / "references").glob("*.lock"))) == 3
