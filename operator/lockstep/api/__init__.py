"""Models of what people write (TrainingJob, TrainingCluster) and of the status they read. Pydantic, no I/O."""
