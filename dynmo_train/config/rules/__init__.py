"""What contradicts what: rules over several options, each a small pure function, by concern."""
