"""`hvdtrain report`: one page about a run, or about two of them, from the files that a run keeps.

`reading` reads these files, `numbers` is the arithmetic, `plots` draws, `words` says it in sentences, `page` is the
HTML, and `command` the command line. Nothing here imports a framework, and nothing but `plots` imports matplotlib.
"""
