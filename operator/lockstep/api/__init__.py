"""What people write: TrainingJob, TrainingCluster and the status they read. Pydantic models, no I/O."""
