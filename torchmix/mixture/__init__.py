"""Which document comes next. Files in reading order: keys.py, permutation.py, order.py, schedule.py, coming.py,
draw.py."""
