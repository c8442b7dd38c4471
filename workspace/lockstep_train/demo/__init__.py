"""A small real base model and real text, made on the spot from what every Python installation carries."""
