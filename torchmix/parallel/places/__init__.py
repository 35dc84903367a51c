"""Where the ranks of a job stand as others describe it, and which of them read.

In reading order:

    device_mesh.py    torch's DeviceMesh -> a topology
    leaders.py        the leader of each rank: one a replica, a node, or a stage
"""
