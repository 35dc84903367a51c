"""DGraph: a strategy of balance in a few calls, from a recipe or from the user's function.

Files in reading order: drawn_step.py, samples.py, items.py, states.py, drawing.py, dgraph.py, step.py, plan_check.py,
strategy.py.
"""
