"""What the user writes: the recipe. In reading order:

structs.py      the recipe, as values
build.py        plain values -> Structs
amounts.py      Shares, percentages and sizes in bytes, exactly
loaders.py      which processes make a run's steps, and what of a node they may take: the `loaders` of a recipe
ramp.py         the size of the global batch over steps, and of its samples: constant, or in stages
sources.py      what a recipe says of the rows of a source: its checks, and what of it decides tokens
model_folder.py what the folder of a model says of its processor
images.py       what a recipe says of the images of a source
sounds.py       what a recipe says of the sounds of a source
videos.py       what a recipe says of the videos of a source
items.py        the recipe's half of the table of kinds of items: their words, what these must mean, what decides tokens
modules.py      what the modules of a recipe must mean
streams.py      the streams of a mixture: what holds a share, and draws from an order of its own; and the rows that
                they draw
parts.py        the parts of a recipe: what training, validation and test plan
fit.py          shares in proportion to sizes, and shares of cells from those of several properties
tree.py         the recipe's `mixture` -> a tree of groups -> the share of each stream
changes.py      the recipe's `schedule` and `dynamic` -> the trees that follow each other, and who decides shares
checks.py       what the values of a recipe must mean
load.py         text or Structs -> a checked recipe
fingerprint.py  the fingerprint of a recipe: which recipes give the same order
"""
