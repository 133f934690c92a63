"""Memory, time and communication of a run by arithmetic: no GPU, no torch, no other ranks. README.md lists what is
exact.
"""
