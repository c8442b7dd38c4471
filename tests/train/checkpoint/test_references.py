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


def test_references_of_another_cpu_or_trainer_go_as_soon_as_no_test_run_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(references, "cpu_flags", lambda: "others")
        other = References()
    with closing(other):
        folder = other.get("run", {}, lambda part: None)
        References().close()
        assert folder.exists()
    with closing(References()) as store:
        assert not folder.exists()
        assert store.get("run", {}, lambda part: None) != folder
