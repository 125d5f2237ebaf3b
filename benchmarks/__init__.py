"""Side by side with peers: `python -m benchmarks`. What each file does stands in README.md."""
