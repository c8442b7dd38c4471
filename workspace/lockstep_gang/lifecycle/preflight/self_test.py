"""The self-test of every device (pure): what its facts mean, and its speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from lockstep_gang.contract.placewords import PlaceWords, words_of
from lockstep_gang.contract.preflight import DeviceResult, Finding, SelfTestResult, Speed
from lockstep_gang.contract.run import Run
from lockstep_gang.lifecycle.preflight.nodes import error, warning
from lockstep_spec.choices import Severity

SELF_TEST, TORCH_BUILD = "selfTest", "torchBuild"
_MEMORY = "OutOfMemoryError"


def judge_self_test(run: Run, tested: Mapping[int, SelfTestResult]) -> list[Finding]:
    """Findings of all nodes. A node is left out (`excludes`) where another one passed; a torch that fits no node is final."""
    findings = [finding for node, answer in tested.items() for finding in _of_node(run, node, answer)]
    bad = {finding.node for finding in findings if finding.severity is Severity.ERROR}
    some_are_good = len(bad) < len(tested)
    return [
        (
            replace(one, excludes=some_are_good, final=not some_are_good and one.check == TORCH_BUILD)
            if one.severity is Severity.ERROR
            else one
        )
        for one in findings
    ]


def _of_node(run: Run, node: int, answer: SelfTestResult) -> Iterator[Finding]:
    name, has_gpus, words = run.node_name(node), run.gpus_of(node) > 0, words_of(run)
    if answer.error:
        fix = (
            f"look at nvidia-smi and at the driver there, and at {words.software}: ranks would meet the same"
            if has_gpus
            else _cpu_fix(words)
        )
        yield error(SELF_TEST, node, f"the self-test of {name} can't use its {'GPUs' if has_gpus else 'CPU'}: {answer.error}", fix)
    for device in answer.devices:
        yield from _of_device(f"{_called(device) if has_gpus else 'the CPU'} of {name}", node, device, words, has_gpus=has_gpus)


def _cpu_fix(words: PlaceWords) -> str:
    return f"look at {words.software}: ranks would meet the same"


def _called(device: DeviceResult) -> str:
    known = ", ".join(filter(None, (device.uuid, device.name)))
    return f"GPU {device.index}" + (f" ({known})" if known else "")


def _of_device(name: str, node: int, device: DeviceResult, words: PlaceWords, *, has_gpus: bool) -> Iterator[Finding]:
    if device.lacking:
        message = f"torch {device.torch} has no code for sm_{device.major}{device.minor}, which {name} is: it is built for {device.built}"
        yield error(TORCH_BUILD, node, message, words.torch_build)
    elif device.error:
        fix = _cpu_fix(words)
        if has_gpus:
            other = "look at nvidia-smi there, and at lines with Xid in the kernel's log (dmesg)"
            fix = "look with nvidia-smi which process holds its memory" if device.error.startswith(_MEMORY) else other
        yield error(SELF_TEST, node, f"{name} failed the self-test: {device.error}", fix)
    elif device.wrong:
        message = (
            f"{name} computes wrong: {device.wrong} of {device.elements} numbers of a product in {device.precision} are not what they"
            " must be"
        )
        gpu_fix = "take it out of use and reset it (nvidia-smi --gpu-reset); replace it if it fails again"
        yield error(SELF_TEST, node, message, gpu_fix if has_gpus else "replace the machine's memory or CPU")
    if device.ecc_errors:
        message = f"{name} has had {device.ecc_errors} uncorrected ECC errors since its driver was loaded"
        yield warning(SELF_TEST, node, message, "look at nvidia-smi -q -d ECC,ROW_REMAPPER there, and reset or replace the GPU")


def speed_of(run: Run, tested: Mapping[int, SelfTestResult]) -> Speed | None:
    """Speed of all devices that passed; None where there is none."""
    passed = [device for answer in tested.values() for device in answer.devices if device.flops and not device.wrong]
    if not passed:
        return None
    precisions = sorted({device.precision for device in passed})
    flops = [device.flops for device in passed]
    return Speed(len(passed), run.gpus_per_node > 0, " and ".join(precisions), min(flops), max(flops))
