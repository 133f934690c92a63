"""The accuracy reward: which part of a response is its answer, and whether that equals the reference answer."""
