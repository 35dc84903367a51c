"""who gets what, when. Files in reading order: (listed when they land)."""
