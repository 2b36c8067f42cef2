"""The subcommands of ``dynmo-train``, a file for each kind; ``cli.py`` puts them together."""
