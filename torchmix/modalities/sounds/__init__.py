"""Sounds: their length, their places in the text, and their log-mel features. In reading order:

header.py    the length of a sound from its header, its last page, or a scan of its frames, without decoding it
features.py  bytes of a sound -> its log-mel features: decoded, mixed to one channel, resampled, cut into chunks
kind.py      sounds, as the seam asks for them
"""
