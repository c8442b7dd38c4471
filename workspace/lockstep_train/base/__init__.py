"""Ground that every other part of the trainer stands on."""
