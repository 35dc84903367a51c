"""What each rank gets of a module: its items' arrays, and the routes of their rows.

Files in reading order: routes.py, image_places.py, arrays.py, mrope.py (torch), batch.py (torch).
"""
