"""Sharing devices between policy and engine, and moving weights from one to the other along a plan of weights.plan."""
