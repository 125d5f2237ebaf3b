"""Build Horovod for the frameworks that are installed, install it, and prove it with a live allreduce.

`build` has the steps; `find` finds what is installed, `changes` changes Horovod's source, `cache` stores wheels.
"""
