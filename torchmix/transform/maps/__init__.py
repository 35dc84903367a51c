"""Functions of the user's over rows. Files in reading order:

row_map.py      `module:function` in a recipe -> the function, with its version
map_encoder.py  a function, and a tokenizer for texts that it gives -> an encoder of rows
"""
