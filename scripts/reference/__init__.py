"""What scripts/generate.py writes: the CRDs, and the reference of fields and verbs."""
