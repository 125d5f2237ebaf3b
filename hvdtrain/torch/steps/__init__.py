"""Take the Trainer's steps: compute, undo, reduce, update, and count for metrics."""
