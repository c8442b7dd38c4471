"""Measurements of `lockstep cluster calibrate`, as they stand in the cluster file: for people and for the command line, not for pods."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from lockstep.api.model import Decimal, Model, list_map

DAY_PATTERN = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"


class MeasuredOver(StrEnum):
    """Transport that the pods were built for."""

    RDMA = "RDMA"
    TCP = "TCP"


class SweepPoint(Model):
    """One size of the all-reduce sweep."""

    bytes: Annotated[int, Field(ge=1, le=2**53)]
    """Bytes that each rank reduced."""
    busbw: Decimal
    """Bus bandwidth in decimal GB/s (10^9 bytes a second): 2 (ranks - 1) / ranks × bytes / time, as nccl-tests gives it."""


class Calibration(Model):
    """One all-reduce sweep. Written by `lockstep cluster calibrate`, one entry a transport."""

    transport: MeasuredOver
    """Transport that the pods were built for: RDMA or TCP."""
    nodes: Annotated[int, Field(ge=1, le=1024)]
    """Nodes that took part."""
    ranks: Annotated[int, Field(ge=2, le=65536)]
    """Ranks that took part: n of the formula."""
    day: Annotated[str, Field(pattern=DAY_PATTERN, max_length=10)]
    """Day of the measurement, as 2026-11-21 (UTC)."""
    sweep: Annotated[list[SweepPoint], Field(min_length=1, max_length=64, json_schema_extra=list_map("bytes"))]
    """Sizes and their bandwidths."""


class Calibrations(Model):
    """The file's section `calibration`."""

    calibration: Annotated[list[Calibration], Field(max_length=2, json_schema_extra=list_map("transport"))] = []
    """Sweeps that were measured, one a transport."""
