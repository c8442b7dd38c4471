"""Samples as token ids."""
