"""Exports for engines, and the proof that one reads an export as it was trained."""
