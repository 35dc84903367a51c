"""Loaders sized and placed by what the data cost. In reading order:

partition.py  which loaders read which sources: a pure function of what the sources cost and of what loaders may take
rule.py       when loaders are started, ended and given other sources: a pure rule over the load that is coming
loads.py      what each source costs a loader, and what that makes of loaders: their number, sources and places
measure.py    what a source costs a loader, measured on some of its rows
scaling.py    loaders that follow a run: started, given sources and ended as the rule decides
nodes.py      those of the nodes of a job: the first node decides, and each starts and ends its own
"""
