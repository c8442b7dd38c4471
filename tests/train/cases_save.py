"""Rank functions of the tests that look into a save."""

from __future__ import annotations
