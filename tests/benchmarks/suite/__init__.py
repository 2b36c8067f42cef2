"""The benchmark suite behind ``bin/bench``.

``measure.py`` runs the programs of a case in turns and summarizes them, ``cases.py`` lists what is measured,
``peers.py`` has loops that a user would write without this project, ``results.py`` writes JSON and Markdown.
"""
