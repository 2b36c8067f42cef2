"""File formats: indexed dataset, its sidecar, documents of a work folder."""
