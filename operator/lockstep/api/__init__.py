"""What people write: TrainingJob, ClusterProfile and the status they read. Pydantic models, no I/O."""
