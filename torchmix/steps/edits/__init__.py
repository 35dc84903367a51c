"""A recipe that changes between a save and a load. Files in reading order:

word.py           what may change, and the word that accepts it
edited_state.py   the state under it
"""
