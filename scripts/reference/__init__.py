"""Pages that scripts/generate.py writes: the reference of fields and verbs."""
