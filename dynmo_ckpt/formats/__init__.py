"""The format ``dynmo.checkpoint`` (specification, schema, fields, rules), and the options of commands."""
