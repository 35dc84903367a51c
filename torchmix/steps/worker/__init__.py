"""A process beside a leader that plans, reads and builds for it; it never loads torch.

In reading order:

    process.py         how such a process starts: as a new interpreter
    messages.py        what is said between leader and worker
    channel.py         the road that it travels: two connected sockets
    shared_arrays.py   where the arrays of steps lie: memory that both processes have mapped
    main.py            the worker's side
    client.py          the leader's side
"""
