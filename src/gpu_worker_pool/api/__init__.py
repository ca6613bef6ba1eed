"""Our HTTP API: the bodies of its routes, and the client with its transport and decoder."""
