"""Leases as a client has them: asked for at one endpoint or several, renewed by a thread, known to be held or lost."""
