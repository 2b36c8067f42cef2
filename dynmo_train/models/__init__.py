"""Model families. Each is a list of named items (embedding, attention and MLP of each layer, head): one short file."""
