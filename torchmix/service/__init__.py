"""Shared loaders: processes that read for many ranks, and their client. Files in reading order:

messages.py      what loaders and clients say to each other
row_lists.py     what maps give beside ids, in a reply
routing.py       which loader owns a page
endpoints.py     where loaders listen
keys.py          who may ask them
served.py        what a loader reads
reading.py       a loader's reading thread
connections.py   bounds on the connections of a loader
server.py        a loader's side of the wire
metrics.py       the figures of a loader for Prometheus
main.py          what runs in a loader process
pool.py          loader processes of this machine
client.py        the client's side of it
members.py       loaders, as one client sees them
fleet.py         requests for all loaders together
fleet_reader.py  pieces of documents -> tokens, asked of loaders
here/            what a process reads itself, in the place of loaders or before it asks them
open_fleet.py    from settings to a reader that asks a fleet
job/             loaders that a job starts on its nodes

The folder scale/ sizes and places loaders by what the data cost; the folder ray/ runs them on a Ray cluster.

The server, the client and the bounds on connections alone use zmq.
"""
