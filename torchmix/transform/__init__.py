"""row -> sample. Files in reading order: (listed when they land)."""
