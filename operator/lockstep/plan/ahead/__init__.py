"""Answers about a job before it takes GPUs: `lockstep plan`."""
