"""The machine: its device, the kernels it has, what FP8 needs on it, and the figures of known cards."""
