"""Images: their sizes, their places in the text, and their patches. In reading order:

header.py  the size of an image from its header, turned as its orientation says, without decoding it
rules.py   size rules: how large an image is resized, and what the models see of it
decode.py  bytes of an image -> its pixels, turned and in RGB
kind.py    images, as the seam asks for them
"""
