"""Loaders of a rank: batches that a seed decides, short batches, and what ranks compare of samples."""
