"""Moves weights from the trainer's layout to the engine's, along a plan of weights.plan."""
