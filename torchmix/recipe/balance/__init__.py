"""What the recipe says of balance: dimensions of the model, and modules with grids of their own.

Files in reading order: structs.py, modules.py.
"""
