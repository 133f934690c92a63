"""Warm worker processes that can be killed: reward functions, agents and tools run in them. Nothing here is heavy."""
