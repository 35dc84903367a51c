"""torchmix init. Files in reading order:

recipe_yaml.py       a new recipe as commented YAML
data_files.py        files, folders, globs and URIs -> the sources that they seem to be
look.py              a look at one file: its columns, and how much of it is text or ids
choose_tokenizer.py  the tokenizer of text, given or asked for
choose_images.py     the images of a source, and the tokens that stand for them
from_files.py        a recipe for data files
megatron_blend.py    Megatron's data flags -> datasets and their shares
megatron_ramp.py     Megatron's flags of the batch -> stages by step
inner_ends.py        a look into a Megatron dataset: EODs inside documents
megatron_resets.py   Megatron's flags about the ends of documents
megatron.py          a recipe for a blend of Megatron's
demo.py              a small corpus and its recipe
command.py           the verb: which of these is asked for
"""
