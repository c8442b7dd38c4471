"""What will become of a job before it takes GPUs: `lockstep plan` and `lockstep diff`."""
