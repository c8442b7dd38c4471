"""What NCCL's logs say of the fabric, and the verdict (pure)."""
