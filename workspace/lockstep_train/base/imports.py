"""Heavy packages without what they import and we never use: most of a start."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from lockstep_spec.choices import Method, Quantization
from lockstep_spec.training import TrainingConfig

OF_FOLDER: Mapping[str, Any] = MappingProxyType({"local_files_only": True, "trust_remote_code": False})
"""Options of every load by transformers: it asks no network and, also at a terminal, nobody whether code of the folder may run."""


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Switch the garbage collector off meanwhile, and let it never look at what is there by then: imports leave no garbage, and looking for
    it was a fifth of a start. Not while weights are loaded, of which none could be freed.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


@contextlib.contextmanager
def hidden_packages(*names: str) -> Iterator[None]:
    """Hide packages meanwhile, unless they are imported already: for importers that take them only where they are there."""
    absent = [name for name in names if name not in sys.modules]
    for name in absent:
        sys.modules[name] = None  # type: ignore[assignment]  # the import system's own mark for "not there"
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name, None)


def import_method(training: TrainingConfig) -> None:
    """Import what a way of training needs, in this order: with packed weights, peft has to find bitsandbytes."""
    if training.model.quantization is not Quantization.NONE:
        import_bitsandbytes()
    if training.method is Method.LORA:
        import_peft()


def import_peft() -> Any:
    """Import peft without bitsandbytes, which it imports where it is there, though only packed weights need it; with them it is imported
    already.
    """
    with hidden_packages("bitsandbytes"):
        peft = importlib.import_module("peft")
        available = importlib.import_module("peft.import_utils")
        available.is_bnb_available()  # both remember their first answer: peft asks again when it wraps a layer
        available.is_bnb_4bit_available()
    return peft


def import_bitsandbytes() -> Any:
    """Import bitsandbytes without torch's compiler: decorating its kernels for other devices than NVIDIA's imports inductor and compiles at
    first use.

    And without `kernels`, by which it would download compiled code for CPUs with AVX512-BF16, for a format that isn't used here
    (model/quantize.py).
    """
    import torch

    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # it would advise to install `kernels`
    with replaced(torch, "compile", uncompiled), hidden_packages("kernels"):
        return importlib.import_module("bitsandbytes")


def uncompiled(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    """Return the function as it is, in place of torch.compile; also as `@compile(…)`."""
    return function if function is not None else lambda wrapped: wrapped


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a module's or a class's attribute for a while."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
