"""The machine: its device and kernels, the requirements of FP8, and data of known GPUs."""
