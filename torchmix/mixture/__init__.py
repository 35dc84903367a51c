"""Which document comes next. Files in reading order: keys.py, permutation.py, strata.py, order.py, schedule.py,
coming.py, draw.py."""
