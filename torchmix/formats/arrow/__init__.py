"""Arrow's IPC files, Feather files and streams. In reading order:

messages.py  an Arrow file -> the messages that hold its record batches, and where their buffers lie
column.py    a column of an Arrow file: its place in every record batch, and the rows of it that can be read alone
scan.py      record batches of an Arrow file -> pages, and their bytes -> an Arrow array
source.py    the source of Arrow files: one column of Arrow's IPC files, Feather files and streams
"""
