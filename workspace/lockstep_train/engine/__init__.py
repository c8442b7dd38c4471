"""Ranks, DeepSpeed and one optimizer step."""
