"""What a node looks at before an attempt: plain facts, judged by the coordinator. Each function may block and is run in a thread."""
