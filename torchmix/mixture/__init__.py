"""Which document comes next. Files in reading order: keys.py, permutation.py, order.py, windows.py, schedule.py,
coming.py, draw.py."""
