"""The lease API: what a server's routes ask of the desk, and how they tell it."""
