"""Names of the tensors that a training state is made of: Adam's are torch's own (pure)."""

MASTER = "fp32"
"""FP32 masters. Each tensor of a shard is flat: the fragments' elements in the order of the manifest's records."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's, in FP32."""
WEIGHTS = "weights"
"""The trained weights as the model computes with them: in the run's precision."""

FULL = (MASTER, *MOMENTS)
LITE = (WEIGHTS,)
