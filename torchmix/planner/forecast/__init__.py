"""A run, planned ahead without data. Files in reading order:

figures.py     what each source will give
simulation.py  the first steps, planned in full
rates.py       the others, at the rate of these
run_ahead.py   both together
"""
