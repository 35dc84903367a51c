"""Which document comes next. In reading order:

keys.py         keys by name, keyed hashes and bijections of [0, n): every random choice of torchmix comes from here
shares.py       shares over training -> the shares of a step, as integers that sum to 2^32
spaces.py       the rows that a stream draws from, as units that are permuted: of a source, a selection or a flat
windows.py      the documents of one window: which rows it has, in what order, and the pieces that they are drawn by
order.py        a stream's endless order: epochs, cut into windows of documents
draw.py         shares -> the stretches of documents that a step draws
policy_log.py   the log of a run's policy, on a disk that all nodes see: what it observed, and what it decided
policies.py     shares that follow what the model learns: the policies, their limits, and the rank that decides
"""
