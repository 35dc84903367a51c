"""torchmix report. In reading order:

log.py      what a trainer has logged: losses by source, waits of ranks, workers that were lost
steps.py    the steps of a run, planned again: shares asked and given, edits, decisions, and the documents of any step
page.py     one page of HTML that needs no network, with page.js and page.css; and `--serve`: the same page from this
            process, which reads any step when it is clicked
command.py  `torchmix report`: a run to look at, from its mixture to the rows of one step
"""
