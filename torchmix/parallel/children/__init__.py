"""Processes that a rank starts and watches. In reading order:

interpreter.py    how one starts: as a new interpreter that runs one function
memory_limit.py   a bound on the memory that one may allocate
judge.py          whether one is gone, stopped or stuck
    pulse.py          what one says of itself for that
"""
