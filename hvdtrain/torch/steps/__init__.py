"""How the Trainer takes a step: compute, undo, reduce, update, and what metrics count."""
