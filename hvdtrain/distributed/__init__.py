"""Who the ranks are, what they agree on, and what keeps one of them from waiting for ever."""
