"""What the user writes: the recipe.

Files in reading order: loader_structs.py, structs.py, yaml_lines.py, build.py, options.py, byte_sizes.py, loaders.py,
shares.py, ramp.py; then the folders balance/, the model and its modules, and source/, one source; streams.py,
held_out.py, parts.py; the folder mixture/, shares; source_checks.py, checks.py, load.py, fingerprint.py.
"""
