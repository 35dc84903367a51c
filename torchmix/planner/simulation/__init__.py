"""What steps would take: a plan beside what jobs do without one. Files in reading order:

named_models.py  dimensions of well-known models
pipeline.py      1F1B: how long a pipeline takes for microbatches of unlike cost
rivals.py        the same step, as jobs without a plan would place it
simulate.py      predicted times of steps, summed
"""
