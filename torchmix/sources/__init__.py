"""how bytes are read. Files in reading order: (listed when they land)."""
