"""Locks, and which file of a package a host's Python takes."""

from __future__ import annotations

import pytest

from lockstep.api.errors import ConfigError
from lockstep.plan.hosts.wheels import HostTarget, Pin, best, is_of, only, rank, read_lock, without
from support.checkout import ROOT

DIGEST = "ab" * 32
HOST = HostTarget((3, 11), "x86_64", (2, 36))


def pin(name: str = "torch", version: str = "2.15.0") -> Pin:
    return Pin(name, version, frozenset({DIGEST}))


@pytest.mark.parametrize(
    ("file", "fits"),
    [
        ("torch-2.15.0-cp311-cp311-manylinux_2_28_x86_64.whl", True),
        ("torch-2.15.0-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", True),
        ("torch-2.15.0-cp310-cp310-manylinux_2_28_x86_64.whl", False),
        ("torch-2.15.0-cp38-abi3-manylinux_2_28_x86_64.whl", True),
        ("torch-2.15.0-cp312-abi3-manylinux_2_28_x86_64.whl", False),
        ("torch-2.15.0-cp313-cp313t-manylinux_2_28_x86_64.whl", False),
        ("torch-2.15.0-py3-none-any.whl", True),
        ("torch-2.15.0-py2.py3-none-any.whl", True),
        ("torch-2.15.0-py2-none-any.whl", False),
        ("torch-2.15.0-py312-none-any.whl", False),
        ("torch-2.15.0-1-py3-none-manylinux_2_17_x86_64.whl", True),
        ("torch-2.15.0-py3-none-manylinux_2_17_aarch64.whl", False),
        ("torch-2.15.0-py3-none-manylinux_2_39_x86_64.whl", False),
        ("torch-2.15.0-cp311-cp311-musllinux_1_2_x86_64.whl", False),
        ("torch-2.15.0-cp311-cp311-win_amd64.whl", False),
        ("torch-2.15.0-cp311-cp311-macosx_11_0_arm64.whl", False),
        ("torch-2.15.0.tar.gz", True),
        ("torch-2.15.0.exe", False),
    ],
)
def test_a_python_takes_the_files_that_are_for_it(file: str, fits: bool) -> None:
    assert (rank(file, HOST) is not None) is fits


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ("torch-2.15.0-cp311-cp311-manylinux_2_28_x86_64.whl", "torch-2.15.0-cp311-cp311-manylinux_2_17_x86_64.whl"),
        ("torch-2.15.0-cp311-cp311-manylinux_2_17_x86_64.whl", "torch-2.15.0-cp311-abi3-manylinux_2_28_x86_64.whl"),
        ("torch-2.15.0-cp310-abi3-manylinux_2_28_x86_64.whl", "torch-2.15.0-cp38-abi3-manylinux_2_28_x86_64.whl"),
        ("torch-2.15.0-cp38-abi3-manylinux_2_28_x86_64.whl", "torch-2.15.0-py3-none-any.whl"),
        ("torch-2.15.0-py3-none-any.whl", "torch-2.15.0.tar.gz"),
    ],
)
def test_the_file_that_is_most_for_it_is_taken(better: str, worse: str) -> None:
    assert best([worse, better], pin(), HOST) == better
    assert best([better, worse], pin(), HOST) == better


def test_no_file_is_taken_where_none_fits() -> None:
    assert best(["torch-2.15.0-cp310-cp310-manylinux_2_28_x86_64.whl", "other-2.15.0-py3-none-any.whl"], pin(), HOST) is None


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("Ruamel.Yaml_clib-0.2-cp311-cp311-any.whl", True),
        ("ruamel_yaml_clib-0.2.tar.gz", True),
        ("ruamel_yaml_clib-0.20-py3-none-any.whl", False),
        ("../ruamel_yaml_clib-0.2-py3-none-any.whl", False),
        ("ruamel_yaml-0.2-py3-none-any.whl", False),
    ],
)
def test_a_file_is_of_a_package_by_its_normalized_name_and_its_version(file: str, expected: bool) -> None:
    assert is_of(file, pin("ruamel-yaml-clib", "0.2")) is expected


def test_a_lock_is_read_with_its_hashes_and_conditions() -> None:
    text = (
        f"# made by uv\nPy_Cpuinfo==9.0.0 \\\n    --hash=sha256:{DIGEST} \\\n    --hash=sha256:{'cd' * 32}\n    # via"
        f" deepspeed\ncolorama==0.4 ; sys_platform == 'win32' --hash=sha256:{DIGEST}\n"
    )
    assert read_lock(text, "a.lock") == [
        Pin("py-cpuinfo", "9.0.0", frozenset({DIGEST, "cd" * 32})),
        Pin("colorama", "0.4", frozenset({DIGEST}), conditional=True),
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


def test_a_lock_is_divided_without_loss() -> None:
    text = (ROOT / "requirements/train.lock").read_text()
    sources, wheels = only(text, ["deepspeed"]), without(text, ["deepspeed"])
    assert [one.name for one in read_lock(sources, "s")] == ["deepspeed"]
    assert {*read_lock(sources, "s"), *read_lock(wheels, "w")} == set(read_lock(text, "all"))
