"""Measure the parts of a step's time."""
