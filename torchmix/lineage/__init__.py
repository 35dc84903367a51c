"""Which document was in which step, and back. Files in reading order:

documents.py    rows of sources, as a person names them, and their ids
appearances.py  the steps in which documents are, and the documents of a step
never_drawn.py  why no step can have a document
deny_list.py    documents to take out of a run, as a file
"""
