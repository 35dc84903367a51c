"""A process of a node that plans, reads and builds for its leaders; it never loads torch.

In reading order:

    channel.py         the road that messages travel: two connected sockets
    messages.py        what is said between host, members and worker
    shared_arrays.py   where the arrays of steps lie: memory that worker and leader have mapped
    shared_stream.py   the worker's side of a stream: made once, taken by several leaders
    main.py            all that the worker does
    last_words.py      what ended a worker, in words
    host.py            starts the worker, and another in its place
    early.py           a worker started before it is known who needs it
    node.py            a leader's hold on the worker of its node
    open_node.py       which leaders share a worker, and how they come to it
    client.py          the leader's side of a stream
"""
