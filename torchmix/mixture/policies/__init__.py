"""Shares that follow what the model learns. Files in reading order:

policy.py        the seam: what a policy observes, and what it answers
limits.py        shares within bounds around those of the schedule
scaling_law.py   losses over tokens -> the curve that they follow
ado.py           Adaptive Data Optimization: more of what is still being learnt
odm.py           Online Data Mixing, and Exp3: bandits whose reward is the loss
shares_file.py   shares that an operator writes while the run goes on
open_policy.py   the policy that a recipe names
log.py           what policies observed and what they answered, on a disk
decider.py       one rank asks a policy, and logs its answers
"""
