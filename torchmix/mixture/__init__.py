"""Which document comes next. Files in reading order: keys.py, permutation.py, strata.py, window_rows.py,
page_windows.py, row_windows.py, window.py, denied.py, edited_windows.py, order.py, stretches.py, coming.py, draw.py,
document_draw.py, next_windows.py. And shares/: the share of each stream; spaces/: the rows that a stream draws from;
policies/: shares that follow what the model learns."""
