"""``dynmo-train run``: execute the commands of a published shell script, which is parsed and never run by a shell."""
