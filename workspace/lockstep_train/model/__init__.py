"""The base model, its tokenizer and the adapter on top."""
