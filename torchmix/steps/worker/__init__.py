"""A process of a node that plans, reads and builds for its leaders; it never loads torch. In reading order:

messages.py       what the processes of a node say to each other, and the sockets that it travels on
keeper.py         whoever starts the worker of a node, watches it, and puts another in its place
shared_arrays.py  where the arrays of steps lie: arenas, memory that leader and worker have both mapped
shared_stream.py  a stream that several leaders of a node take their steps from: planned once, read once, built for
                  each
main.py           the worker's side: what runs in the process
client.py         a leader's hold on the worker of its node, and the steps that come from it
early.py          a worker that is started before it is known who needs it
open_node.py      which leaders share a worker, and how they come to it
"""
