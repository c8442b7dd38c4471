"""TrainingJob.status, its conditions, events and measures."""
