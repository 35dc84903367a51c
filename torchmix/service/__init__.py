"""Shared loaders: processes that read for many ranks, and their client. In reading order:

messages.py      what loaders and their clients say to each other: two frames a message, of which nothing is executable
routing.py       which loader owns a page: rendezvous hashing, so that all clients come to the same without a word
endpoints.py     where loaders listen: written as text with ranges, or registered as files in a folder
keys.py          keys of CURVE in a folder: who may ask loaders, and how clients know that it is their loaders that
                 they ask
served.py        what a loader process reads: the catalogs of a recipe, one reader for each, and the thread that reads
connections.py   bounds on the connections of a loader, where ZeroMQ has none: a peer that sends what no message comes
                 of is cut off
client.py        the client's side of the wire: a connection to each loader, and what comes over them
server.py        a loader's side of the wire: one socket, one thread that reads, and bounds on all that clients may
                 make it hold
main.py          what runs in a loader process
pool.py          loader processes of this machine: started, watched, started again, ended
members.py       the loaders of a fleet, as one client sees them: which there are, which answer, which refuse
fleet.py         requests for all loaders together: who is asked, how much at a time, and who is asked next when one
                 does not answer
fleet_reader.py  pieces -> their tokens, asked of a fleet: the same as a `Reader` gives
routed_reader.py a reader that has each page read by loaders or by this process, as a table says
open_fleet.py    from settings to a reader that asks a fleet, and that reads here when the fleet is lost
roster.py        which rank starts loaders, who may ask them, and where they listen: what the ranks of a job tell each
                 other
scale/           loaders sized and placed by what the data cost
ray/             loaders and index shards on a Ray cluster
open_job.py      the loaders of a job: started together, shared by the loaders of a process, left together
"""
