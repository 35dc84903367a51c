"""Images of sources. Files in reading order:

image_reader.py  numbers of images -> their bytes
patches.py       images as documents of their patches, for loaders that decode
"""
