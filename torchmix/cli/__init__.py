"""the command line. Files in reading order: (listed when they land)."""
