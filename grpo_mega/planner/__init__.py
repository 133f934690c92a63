"""What a run needs and how fast it will be, by arithmetic: no GPU, no torch, no other ranks. README.md says what is exact."""
