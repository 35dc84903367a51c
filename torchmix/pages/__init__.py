"""Pages and rows for anybody's loader, without a recipe. Files in reading order:

arrow_rows.py   documents -> an Arrow array of rows
row_numbers.py  rows as a user gives them -> their numbers
row_order.py    the rows of an epoch, window by window
row_batches.py  rows of epochs, some at a time, read ahead
wording.py      errors of a recipe in the words of a call
pages.py        pages, rows, and orders of them
open.py         files -> their pages, indexed where that was not done
"""
