"""Loaders sized and placed by what the data cost. Files in reading order:

profile.py    what each source costs, as it was measured
measure.py    source -> what it costs
partition.py  what sources cost -> which loaders read them
placing.py    where rows are transformed: in loaders or in node workers
loads.py      steps -> what they cost loaders
rule.py       when loaders are started and ended
progress.py   how far a run is
scaling.py    loaders that follow a run
bounds.py     how many loaders there may be, from what the user says
shares.py     which sources and how much of the cache each loader has
local.py      loaders of this machine, started and ended one by one
"""
