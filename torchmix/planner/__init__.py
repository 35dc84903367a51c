"""Who gets what, when.

Files in reading order: cost.py, pack.py, balance.py, items.py; the folder methods/; plan.py; the folder graph/;
names.py, stream_order.py, shares_of_step.py, asking.py; the folder eras/; cursor.py, drawing.py, planner.py,
open_documents.py, one_pass.py, plans.py, raw.py; the folder forecast/.
"""
