"""Token-tiled tensor operations on logits split over the vocabulary; `reference.py` holds the naive twin of each."""
