"""The machine: its device and kernels, the requirements of FP8, and the figures of known cards."""
