"""The lease API of the server."""
