"""One script a peer: each makes the same model, trains it the peer's way, and ticks after every step."""
