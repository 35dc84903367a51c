"""torchmix init. In reading order:

recipe_yaml.py     a new recipe as YAML that a person edits further: keys in reading order, each with what it stands for
choose.py          the tokenizer of text, and the items of a source with the tokens that stand for them, as keys of a
                   recipe
from_files.py      `torchmix init FILE...`: a recipe for data files as they lie
megatron_blend.py  Megatron's data flags -> datasets, their exact shares, and where their documents end
megatron.py        `torchmix init --from-megatron`: a recipe for the blend that a team trains on with Megatron
command.py         `torchmix init`: a recipe for files that a team has, for a blend of Megatron's, or a demonstration
"""
