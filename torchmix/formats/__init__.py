"""What the files of each format say, and how their pages become documents. In reading order:

source.py      what every kind of source gives: a scan of each file, and the documents of a run of pages
items.py       the items of a source, such as images: their column, their headers, their places in lists of texts
decompress.py  compressed bytes -> exactly as many bytes as their format says they hold, or an error; and their CRC-32
column.py      what a column may hold, and the rows of Arrow arrays as documents, where some rows cannot be read; and
               how large the lists are that maps give
documents.py   rows that become documents by a template, a list of texts and items, or a mask of loss, as a source
look.py        what seems to be text, tokens, conversations and items in a file that nobody has described
parquet/       Parquet
megatron/      Megatron's .bin and .idx
jsonl/         JSON lines
arrow/         Arrow's IPC files, Feather files and streams
webdataset/    WebDataset: samples as consecutive members of tar files
kept_ids.py    ids that the index keeps of texts: their files, and the source that reads them in place of the texts
table.py       the table of formats: how files of each are found, scanned and read
"""
