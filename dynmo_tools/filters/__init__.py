"""Steps that clean, fix, merge, number and shuffle documents; ``base.py`` is the interface of filters."""
