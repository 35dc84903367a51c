"""What the user writes: the recipe.

Files in reading order: structs.py, yaml_lines.py, build.py, options.py, byte_sizes.py, shares.py, ramp.py,
documents.py, bad_rows.py, resets.py, source_format.py, tokenizer_kind.py, checks.py, load.py, parts.py, fingerprint.py.
"""
