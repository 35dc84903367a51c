"""which document comes next. Files in reading order: (listed when they land)."""
