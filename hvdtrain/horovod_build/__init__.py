"""Build Horovod for the frameworks that are installed, install it, and prove it with a live allreduce: see `build`."""
