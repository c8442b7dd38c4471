"""Where the quickstart runs."""

from __future__ import annotations

import os
import platform

import pytest

from lockstep.cli import quickstart


@pytest.mark.parametrize(
    ("system", "user", "reason"),
    [
        ("Linux", 0, None),
        ("Linux", 1000, "The embedded cluster needs root"),
        ("Darwin", 0, "Darwin has no network namespaces for an embedded cluster"),
    ],
)
def test_the_job_runs_as_processes_where_the_embedded_cluster_can_t(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], system: str, user: int, reason: str | None
) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(quickstart, "_run_local", lambda: 11)
    monkeypatch.setattr(quickstart, "_run_on_cluster", lambda context, embedded: 22)
    with pytest.raises(quickstart.typer.Exit) as ended:
        quickstart.quickstart(local=False, context=None)
    assert ended.value.exit_code == (22 if reason is None else 11)
    assert (reason or "took") in capsys.readouterr().out


def test_a_cluster_of_your_own_is_used_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/somewhere")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    seen: list[tuple[str | None, bool]] = []
    monkeypatch.setattr(quickstart, "_run_on_cluster", lambda context, embedded: seen.append((context, embedded)) or 0)
    with pytest.raises(quickstart.typer.Exit):
        quickstart.quickstart(local=False, context="mine")
    assert seen == [("mine", False)]
