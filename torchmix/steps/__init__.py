"""The making of steps, without torch. Files in reading order:

cursor_bounds.py  what a cursor may hold, from the recipe and the catalog
state.py          all that a run must keep of its data plane, as bytes
boundary.py       what of a state alters from step to step
edits/            a recipe that changes between a save and a load
cursor_state.py   a cursor -> the state that keeps it, and back
header.py         what travels with a step's tensors
bad_tokens.py     how many tokens a run may read in vain
decisions.py      the log of a policy's decisions, waited for and read
stop_signal.py    a flag that ends the making of steps
windows_ahead.py  the next window of each source, decoded while the present one is consumed
images/           images of items: read, decoded somewhere and cut into patches
module_items.py   what the ranks of a replica compute of modules: read, and routed
node_limits.py    what the kernel lets a job use of a machine
replay/           a plan on disk, and steps made from it
blocks/           several small steps at a time
memory_budget.py  what reading takes of a node at most, added up
replica_steps.py  the steps of one replica: planned, read and built
local_steps.py    the same, with a reader of this process

Then history/: the steps of a run over its edits; and worker/: a process beside a leader that makes its steps.
"""
