"""documents -> tensors. Files in reading order: (listed when they land)."""
