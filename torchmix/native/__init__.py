"""The loops that numpy cannot make cheap, in plain C; the Python beside each is its reference. In reading order:

native.h  what all C files share: arrays of the caller's, the head of a call, the check of an array's bounds
gather.c  pieces of documents -> where they lie; pages and mapped files -> tokens and labels at their places; labels and
          spans of a microbatch -> its loss mask, positions and numbers of sources
fold.h    what the files of the fold share: windows at hand, pieces, memory for one step
draw.c    what a step draws from its streams
pack.c    pieces -> samples of a step
fold.c    some steps, one after the other
place.c   samples -> (rank, microbatch); items -> bins below a limit
contexts.c  samples of any length -> bins, and bins -> (run of ranks, microbatch)
build.py  the C files -> one shared library, with a digest of the sources in it
load.py   the library, loaded once; why it is not used; the one way to call it
calls.py  the structs of the calls, as the C files have them

The library is optional: where it is not built, everything works by the reference. It knows no Python, so one build is
for all versions. A call is one struct of addresses and lengths. It holds no lock of the interpreter, starts no thread,
keeps nothing, and takes milliseconds at most, so signals and heartbeats do not wait.
"""
