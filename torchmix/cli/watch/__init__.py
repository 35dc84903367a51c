"""What runs on this machine, and what runs have left. In reading order:

top.py     `torchmix top`: this user's runs on this machine, as they are now
doctor.py  `torchmix doctor`: what dead runs of this user have left on this machine, and with --clean its removal
"""
