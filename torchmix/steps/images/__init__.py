"""Images of steps. Files in reading order:

decode_place.py  where images are decoded: by loaders, the worker or the rank
at_rank.py       files of images that a rank got -> patches, where ranks decode
step_images.py   images of items: read, and decoded where that is here
"""
