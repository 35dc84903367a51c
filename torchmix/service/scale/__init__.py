"""Loaders sized and placed by what the data cost. Files in reading order:

profile.py    what each source costs, as it was measured
measure.py    source -> what it costs
partition.py  what sources cost -> which loaders read them
loads.py      steps -> what they cost loaders
"""
