"""Steps of a run from its beginning on, over its edits. Files in reading order:

run_fold.py  the steps of a run, planned one after another, each by the recipe that it had
entries.py   where recipes took hold in runs, on disk
segments.py  the history of one run
start.py     the cursor of a state that may name a step alone
"""
