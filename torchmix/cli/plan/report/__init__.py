"""torchmix plan --report: one page that needs no network. Files in reading order:

numbers.py  what the page shows, as numbers
figures.py  charts of it, as SVG
page.py     the page
"""
