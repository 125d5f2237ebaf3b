"""Send what a run is and how it goes to the tools that people compare runs with.

`Logger` decides what is logged, when and on which rank; a sink, one a tool, only writes it down.
"""
