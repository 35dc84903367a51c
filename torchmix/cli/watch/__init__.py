"""What runs on this machine, and what runs have left. Files in reading order:

top.py     torchmix top
doctor.py  torchmix doctor
"""
