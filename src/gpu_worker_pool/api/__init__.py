"""The HTTP API of a GPU server, seen by those who call it: one typed client, its transport and its decoder."""
