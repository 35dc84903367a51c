"""torchmix plan. Files in reading order:

summary.py  steps of a plan, summed
files.py    every piece of a plan, as Parquet
command.py  the steps of a run before it runs
"""
