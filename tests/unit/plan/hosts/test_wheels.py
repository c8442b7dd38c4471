"""Locks, and which file of a package a host's Python takes."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.api.errors import ConfigError, Failed
from lockstep.plan.hosts.wheels import HostTarget, Pin, lock_of, offers_of, read_lock
from support.checkout import ROOT

DIGEST = "ab" * 32
HOST = HostTarget((3, 11), "x86_64", (2, 36))
PIN = Pin("torch", "2.15.0", frozenset({DIGEST}))


def listing(*names: str, sha256: str = DIGEST, folder: str = "https://files/x") -> dict[str, list[Any]]:
    """Listing of a package with these files, as uv makes it."""
    files = [{"url": f"{folder}/{name}", "hashes": {"sha256": sha256}} for name in names]
    kinds = {"wheels": [file for file in files if file["url"].endswith(".whl")], "sdist": files[-1]}
    return {"packages": [{"name": "torch", **kinds}]}


def test_a_file_that_is_here_is_taken_and_not_downloaded() -> None:
    here, there = listing("torch-2.15.0.tar.gz", folder="file:///x"), listing("torch-2.15.0-cp311-cp311-manylinux_2_28_x86_64.whl")
    both = {"packages": [{**there["packages"][0], "sdist": here["packages"][0]["sdist"]}]}
    assert [offer.is_here for offer in offers_of(both, [PIN], HOST)] == [True]


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ("torch-2.15.0-cp311-cp311-manylinux_2_28_x86_64.whl", "torch-2.15.0-cp311-cp311-manylinux_2_17_x86_64.whl"),
        ("torch-2.15.0-cp311-cp311-manylinux_2_17_x86_64.whl", "torch-2.15.0-cp310-abi3-manylinux_2_28_x86_64.whl"),
        ("torch-2.15.0-cp310-abi3-manylinux_2_28_x86_64.whl", "torch-2.15.0-cp38-abi3-manylinux_2_28_x86_64.whl"),
        ("torch-2.15.0-cp38-abi3-manylinux_2_28_x86_64.whl", "torch-2.15.0-py3-none-any.whl"),
        ("torch-2.15.0-py311-none-any.whl", "torch-2.15.0-py39-none-any.whl"),
        ("torch-2.15.0-py3-none-any.whl", "torch-2.15.0.tar.gz"),
    ],
)
def test_of_the_files_that_fit_the_newest_one_is_taken(better: str, worse: str) -> None:
    for names in ((better, worse), (worse, better)):
        assert [offer.name for offer in offers_of(listing(*names), [PIN], HOST)] == [better]


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (listing("torch.whl", sha256="0" * 64), r"no file with a digest of the lock for torch 2\.15\.0 for Python 3\.11 on x86_64"),
        (listing("..%2Ftorch.whl"), r"no file with a digest of the lock for torch 2\.15\.0"),
        (listing("torch.whl", sha256="0" * 64, folder="file:///a%20b"), f"/a b/torch.whl has the SHA-256 .*, but the lock has {DIGEST}"),
    ],
    ids=["another digest", "a path upward", "another digest in the folder"],
)  # fmt: skip
def test_no_file_is_taken_that_is_not_the_lock_s(page: dict[str, Any], message: str) -> None:
    with pytest.raises(Failed, match=message):
        offers_of(page, [PIN], HOST)


@pytest.mark.parametrize(
    ("glibc", "minor"), [((2, 17), 17), ((2, 27), 17), ((2, 30), 28), ((2, 36), 36), ((2, 41), 40), ((3, 0), 40), ((2, 5), 17)]
)
def test_uv_chooses_for_a_glibc_that_is_no_newer_than_the_host_s(glibc: tuple[int, int], minor: int) -> None:
    assert HostTarget((3, 12), "aarch64", glibc).options[-1] == f"aarch64-manylinux_2_{minor}"


def test_a_lock_is_read_with_its_hashes() -> None:
    text = (
        f"# made by uv\nPy_Cpuinfo==9.0.0 \\\n    --hash=sha256:{DIGEST} \\\n    --hash=sha256:{'cd' * 32}\n    # via"
        f" deepspeed\ncolorama==0.4 ; sys_platform == 'win32' --hash=sha256:{DIGEST}\n"
    )
    assert read_lock(text, "a.lock") == [
        Pin("py-cpuinfo", "9.0.0", frozenset({DIGEST, "cd" * 32})),
        Pin("colorama", "0.4", frozenset({DIGEST})),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("torch==2.15.0", "a.lock:2: torch has no --hash=sha256"),
        (f"torch>=2 --hash=sha256:{DIGEST}", "a.lock:2: .* pins no package"),
        ("--index-url https://example.com", "a.lock:2: .* pins no package"),
        ("torch @ https://example.com/torch.whl", "a.lock:2: .* pins no package"),
        (f"torch==2.15.0 --hash=sha256:{DIGEST[:-1]}", "a.lock:2: .* pins no package"),
    ],
)
def test_a_line_that_pins_nothing_is_refused_by_its_number(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_lock(f"# first\n{line}\n", "a.lock")


def test_an_empty_lock_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a\.lock pins no package"):
        read_lock("# nothing\n", "a.lock")


@pytest.mark.parametrize("name", ["train", "bootstrap"])
def test_our_own_locks_are_read_whole(name: str) -> None:
    text = (ROOT / f"requirements/{name}.lock").read_text()
    pins = read_lock(text, name)
    assert len(pins) == sum(line[:1].isalnum() for line in text.splitlines())
    assert sum(len(one.hashes) for one in pins) == text.count("--hash=")


def test_a_lock_is_written_again_without_loss() -> None:
    pins = read_lock((ROOT / "requirements/train.lock").read_text(), "all")
    assert read_lock(lock_of(pins), "again") == pins
