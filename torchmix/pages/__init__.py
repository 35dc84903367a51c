"""Pages and rows for anybody's loader, without a recipe. Files in reading order:

arrow_rows.py   documents -> an Arrow array of rows
row_order.py    the rows of an epoch, window by window
row_batches.py  rows of epochs, some at a time, read ahead
pages.py        files -> an index, pages, rows, and orders of them
"""
