"""Videos: their length and size, their places in the text, and the patches of their frames. In reading order:

packets.py  what the tables and packets of a video say, without decoding it
frames.py   which frames are seen, decoded from the keyframe before, and scaled
kind.py     videos, as the seam asks for them
"""
