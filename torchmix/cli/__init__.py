"""The command line. Files in reading order; the folder `init` stands behind the first:

terminal.py        exit codes, counts, tables, JSON, progress: what every verb shares
index.py           torchmix index: build the catalog
groups.py          what the groups of a mixture give together
findings.py        what is wrong with the mixture, or worth knowing
file_findings.py   what is wrong with files and columns
vocabulary_findings.py  ids that the model does not have, or of two vocabularies
check.py           torchmix check: will this recipe train as it says?
plan_summary.py    steps of a plan, summed
plan_files.py      every piece of a plan, as Parquet
plan.py            torchmix plan: the steps of a run before it runs
readable.py        text from files, made safe and short for a terminal
documents.py       documents as a person looks at them: where a row lies, its ids, its text
show_rows.py       rows of a source, as training sees them
show_step.py       what one step gives to a model
show.py            torchmix show: the text or tokens of rows, or of a step
reframe.py         torchmix reframe: a compressed file in small frames
main.py            arguments, errors, exit codes
"""
