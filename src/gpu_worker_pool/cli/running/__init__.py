"""`run` and `wait`: a process that asks for a GPU and keeps it, and one that hears signals and runs the command."""
