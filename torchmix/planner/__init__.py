"""Who gets what, when. In reading order:

pack.py          pieces -> samples of fixed capacity, over the whole global batch
balance.py       sizes -> costs -> (rank, microbatch): who computes what, when
methods.py       methods of balance: items with costs -> bins
contexts.py      pieces -> bins of runs of ranks: how many ranks share a document, and which documents share ranks
plan.py          one step's result: which pieces, in which samples, on which rank, in which microbatch
graph/           DGraph: a strategy of balance in a few calls, from a recipe or from the user's function
stream_order.py  a stream of a part -> its order: which rows are used, and how many tokens of each document count
drawing.py       what a step asks of its streams, and the draws that answer
cursor.py        where a run stands: everything that the coming steps depend on besides the recipe and the catalog
eras.py          edits of rows -> the windows of the epochs that they fell into, and the orders that follow them
folding.py       the fold of some steps in one native call, kept until they are asked for
planner.py       the fold: `step(cursor) -> (StepPlan, cursor')`, pure
entering.py      a cursor that was read -> one of the planner: in line with edits, filled in, in its bounds
plans.py         planning as calls: the plans of a recipe's steps, and plans of one's own
forecast.py      what each source will give in N steps: the plan, run ahead without data
simulation.py    predicted times of steps: a plan beside what jobs do without one
tuning.py        other ways to balance the same samples, and the predicted time of each
"""
