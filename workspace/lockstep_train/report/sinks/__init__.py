"""Destinations of metrics besides the JSONL files: TensorBoard, MLflow, Weights & Biases. Each in a thread of its own, behind a bounded
queue.
"""
