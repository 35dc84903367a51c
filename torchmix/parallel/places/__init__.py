"""Where the ranks of a job stand, as others describe it.

In reading order:

    device_mesh.py    torch's DeviceMesh -> a topology
"""
