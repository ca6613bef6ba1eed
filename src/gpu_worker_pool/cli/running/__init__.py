"""`run` and `wait`: the front process, which runs the command, and the lease process, which holds the lease."""
