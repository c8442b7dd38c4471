"""Job files and cluster files: text in; models, or every mistake with its line, out. No I/O."""
