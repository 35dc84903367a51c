"""Megatron's .bin and .idx. In reading order:

files.py   files of Megatron datasets, and the heads of their .idx files
source.py  the source of Megatron's datasets: pairs of .bin and .idx, read as they are
"""
