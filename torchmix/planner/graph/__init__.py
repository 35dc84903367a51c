"""DGraph: a strategy of balance in a few calls, from a recipe or from the user's function. In reading order:

samples.py     samples -> (rank, microbatch) by any method, at any level; balance has the one that recipes use most
items.py       items -> consumers: which rank computes which item of a module
drawing.py     the road of every piece of a step, and a picture of a microbatch as SVG
dgraph.py      DGraph: who computes what of a step, said in a few chained calls
plan_check.py  the rules of a plan that code of the user's has made: by a strategy, a method of balance, or `plan_raw`
strategy.py    Strategies: who computes what of each step, from the recipe or from a function of the user's
"""
