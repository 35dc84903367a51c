"""The command line. Files in reading order; a folder for each verb that has several stands behind the second:

terminal.py  exit codes, counts, tables, JSON, progress: what every verb shares
groups.py    what the groups of a mixture give together
denied.py    what deny-lists take out of sources
selections.py what rows of a source have shares of their own
layout.py    the options that say how large a job is
index.py     torchmix index: build the catalog
query.py     torchmix query: SQL over properties
properties.py torchmix properties add: a table of further properties
profile.py   torchmix profile: what each source costs a loader
budget.py    what the loaders of a recipe may take
keys.py      torchmix keys: the keys of shared loaders and of their clients
serve.py     torchmix serve: shared loaders
diff.py      torchmix diff: what an edit changes, and the word that accepts it
calibrate.py torchmix calibrate: the cost of a sample from timings
reframe.py   torchmix reframe: a compressed file in small frames
main.py      arguments, errors, exit codes
start.py     the program: an interrupt while it imports is no error
"""
