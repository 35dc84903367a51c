"""Which ranks live: a rank that is killed, stopped or fails is named by all others, which then end. In reading order:

evidence.py     which process a rank is, what the kernel says of it, and what ranks write for each other
ring.py         is the next rank alive? The decision behind liveness, without threads, store or sockets
termination.py  SIGTERM: find out who is lost, then end as the signal says
guard.py        heartbeats and the abort key: a rank that is killed, stopped or failed is named by all others, which
                then end
open.py         one liveness for all loaders of a rank, over the store of the job
"""
