"""What runs on this machine, and what runs have left. In reading order:

top.py     `torchmix top`: this user's runs on this machine, as they are now
doctor.py  `torchmix doctor`: whether the native library is used; what dead runs have left, and with --clean its removal
"""
