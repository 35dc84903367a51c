"""Ways to share items out among bins.

Files in reading order: bins.py, lpt.py, near_home.py.
"""
