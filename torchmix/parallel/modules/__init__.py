"""Modules with grids of their own: where ranks stand, and rows that travel between them.

Files in reading order: rank_places.py, broadcast.py, route.py (torch).
"""
