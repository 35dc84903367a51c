"""torchmix trace. Files in reading order:

asked.py    the documents that a command names
command.py  in which steps documents are, and the documents of a step
"""
