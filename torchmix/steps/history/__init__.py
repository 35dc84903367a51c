"""Steps of a run from its beginning on, over its edits. Files in reading order:

run_fold.py  the steps of a run, planned one after another, each by the recipe that it had
"""
