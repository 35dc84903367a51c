"""torchmix check. Files in reading order:

stream_facts.py         what is known of a stream before a run
findings.py             what is wrong with the mixture, or worth knowing
fill_findings.py        batches that hold much padding
file_findings.py        what is wrong with files and columns
vocabulary_findings.py  ids that the model does not have, or of two vocabularies
image_findings.py       which source the encoder works for, and images that samples cannot hold
loss_findings.py        how much of the tokens of a source is trained on
schedule_findings.py    where changes of the shares begin
cell_findings.py        rows that are in no cell, or in no child that has a share
memory_findings.py      what reading will take of a node
command.py              will this recipe train as it says?
"""
