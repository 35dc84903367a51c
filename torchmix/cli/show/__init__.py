"""torchmix show. Files in reading order:

readable.py   text from files, made safe and short for a terminal
documents.py  documents as a person looks at them: where a row lies, its ids, its text
rows.py       rows of a source, as training sees them
step.py       what one step gives to a model
page.py       samples of a step as a page of HTML, with their images
command.py    the text or tokens of rows, or of a step
"""
