"""The story of `fit`: what the Trainer is given, the loop that it runs, and how a run stops and resumes."""
