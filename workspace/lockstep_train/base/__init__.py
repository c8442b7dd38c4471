"""What every other part of the trainer stands on."""
