"""What a leader sends to a rank for one global batch.

Files in reading order: wire.py, share.py (torch).
"""
