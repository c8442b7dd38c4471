"""What a node looks at before an attempt."""
