"""Loaders that a job starts on its nodes, and ends with itself. In reading order:

address.py     where a node's loaders listen, so that the other nodes reach them
roster.py      which rank starts loaders, who may ask them, and where they listen
mirror.py      loaders that come and go, known on every node
ray_loaders.py the loaders of a job on a Ray cluster
open_job.py    the loaders of a job: started together, shared by the loaders of a process, left together
"""
