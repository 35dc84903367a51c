"""what data exists. Files in reading order: (listed when they land)."""
