"""Which ranks live: a rank that is killed, stopped or fails is named by all others, which then end.

In reading order:

    evidence.py      which process a rank is, and what the kernel says of it
    patience.py      how long others may be silent, and how often the job's store is asked
    records.py       what ranks write for each other into the store
    ring.py          is the next rank alive: judged by beats and by the kernel
    host_watch.py    the ranks of a host, looked at by the kernel alone
    known_loss.py    the loss that this process knows of
    pulse.py         the thread that beats and looks
    termination.py   SIGTERM: a last look, and then the end that it means
    guard.py         the whole of a rank: its pulse, and the guard that measures it and ends the process
    open.py          one liveness for all loaders of a rank                              (torch)
"""
