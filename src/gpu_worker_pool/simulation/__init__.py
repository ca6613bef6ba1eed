"""Runs the core over a recorded or generated workload, and compares it with other ways to schedule it."""
