"""The one room that knows DeepSpeed's internals (deepspeed 0.19.8, pinned). tests/unit/train/test_deepspeed.py says which feature needs
which of them.
"""
