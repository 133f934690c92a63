"""The accuracy reward: find the answer in a response, and compare it with the gold answer."""
