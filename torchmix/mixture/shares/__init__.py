"""Integer shares of the streams, over training. Files in reading order:

integers.py  exact shares -> integers that sum to 2^32
schedule.py  shares over training -> the shares of a step
"""
