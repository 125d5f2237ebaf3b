"""`hvdtrain report`: one page about a run, or about two of them, from the files in a run's folder.

`reading` reads these files, `numbers` is the arithmetic, `plots` draws, `words` makes sentences of it, `page` is the
HTML. Nothing here imports a framework, and nothing but `plots` imports matplotlib.
"""
