"""/v1/responses: items in, items out."""
