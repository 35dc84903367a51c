"""torchmix plan. Files in reading order:

summary.py  steps of a plan, summed
tree.py     who reads in a job, and who is served
loaders.py  which loaders would read which sources
simulate.py what the steps would take
report/     one page with charts
command.py  the steps of a run before it runs
"""
