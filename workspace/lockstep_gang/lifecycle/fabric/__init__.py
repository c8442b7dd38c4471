"""The fabric, by NCCL's logs, and the verdict on it (pure)."""
