"""Processes, networks, files and logs of this host: nothing here knows of training."""
