"""Ways to share items out among bins, and what they are judged by.

Files in reading order: bins.py, lpt.py, near_home.py, dealing.py, karmarkar_karp.py, own_method.py, objectives.py.
"""
