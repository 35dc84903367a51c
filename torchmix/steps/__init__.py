"""The making of steps, without torch. In reading order:

state.py          LoaderState: all that a run must keep of its data plane, as bytes
edits.py          a state under the recipe in use: as it is, edited with the code that accepts the edit, or refused
header.py         what travels with a step's tensors: its digests, the state after it, and a report
bad_tokens.py     tokens that could not be read: how many a run may have, and whether it has more
decisions.py      the log of decisions as planning reads it: a record is waited for until it is there
windows_ahead.py  decode the next window of each stream while the present one is consumed
module_items.py   the items of a step's modules: read, decoded and cut into patches, for the ranks of one replica
replay.py         plans as files: written to be looked at, and replayed on any layout
ahead.py          an iterator whose items a thread makes ahead of its consumer, and the flag that ends their making
blocks.py         blocks of steps: planned one after the other, read and built at once
history.py        where recipes took hold in runs, which recipe a run had from which step on, and its steps, planned
                  one after another, each by the recipe that it had then
replica_steps.py  the steps of one replica, or of several, in blocks: planned, read and built
local_steps.py    the steps of replicas, read in this process: the one place of this room that opens a catalog and a
                  reader
memory_budget.py  what reading takes of a node's memory at most, and what the kernel lets this job use
worker/           a process of a node that plans, reads and builds for its leaders; it never loads torch
"""
