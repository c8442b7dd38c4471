"""A small real base model and chats that correct it, made on the spot from what every Python installation carries."""
