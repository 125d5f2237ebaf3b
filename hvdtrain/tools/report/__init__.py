"""`hvdtrain report`: one page about a run, or about two of them, from the files in a run's folder.

`reading` reads these files, `numbers` is the arithmetic and what it says, `plots` draws, `page` is the HTML. Nothing
here imports a framework, and nothing but `plots` imports matplotlib.
"""
