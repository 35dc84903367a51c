"""Processes that a rank starts and watches. In reading order:

interpreter.py    how one starts: as a new interpreter that runs one function
judge.py          whether one is gone, stopped or stuck
    pulse.py          what one says of itself for that
"""
