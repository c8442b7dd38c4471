"""Programs that are sent into pods as text, and run there by the pod's own Python: standard library only."""
