"""The ranks, what they agree on, and the watchdog that ends a wait."""
