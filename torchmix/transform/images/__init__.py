"""Images -> their sizes, and their patches. Files in reading order:

orientation.py   how a viewer turns an image, by EXIF and XMP
header.py        the size of an image, without decoding it
raw_bytes.py     values of a column as they are, by way of a tokenizer
rule.py          what a size rule gives
dynamic.py       an image keeps its ratio, as Qwen2-VL resizes
tiles.py         square tiles and a thumbnail, as InternVL cuts
anyres.py        a small picture and tiles of a canvas, as LLaVA-NeXT does
own_rule.py      a function of the user's
open_rule.py     the recipe's words -> a size rule
decode.py        bytes -> turned pixels in RGB
make.py          bytes -> patches, as a step delivers them
"""
