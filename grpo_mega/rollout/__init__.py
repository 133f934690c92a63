"""Engines that sample groups of responses; see engine.py for what they have in common."""
