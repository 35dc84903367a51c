"""Arrow's IPC files, Feather files and streams. Files in reading order:

message.py  metadata of messages: where the buffers of a batch lie
layout.py   a column's buffers among them -> an Arrow array
slices.py   rows of a batch that can be read alone
page.py     bytes of a page -> an Arrow array
batches.py  a file or stream -> the messages of its batches
column.py   a column's name -> the column
scan.py     batches -> pages
properties.py  other columns of a file
look.py     a file -> the columns that one may train on
source.py   the source of Arrow files
"""
