"""Ranks started by other engines than a launcher, each an optional extra."""
