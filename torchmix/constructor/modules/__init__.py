"""What each rank gets of a module: its items' arrays, and the routes of their rows.

Files in reading order: routes.py, arrays.py, batch.py (torch).
"""
