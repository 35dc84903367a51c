"""The run that a verb plans. Files in reading order:

decisions.py  the option --decisions: the log of a policy
steps.py      the steps of a run: by its state, its history and its log
second_interpreter.py  a step placed again, where the user's functions have no history
"""
