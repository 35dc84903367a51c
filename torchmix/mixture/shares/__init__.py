"""Integer shares of the streams, over training. Files in reading order:

integers.py  exact shares -> integers that sum to 2^32
places.py    where the changes of a schedule lie in the run
schedule.py  shares over training -> the shares of a step
"""
