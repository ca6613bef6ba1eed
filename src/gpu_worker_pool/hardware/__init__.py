"""What this host's GPUs show: readers of the driver, one sample a moment, shared by every process of the host.

Knows nothing of HTTP, leases or waiting workers. Whoever needs readings, a server or a program with none, uses this.
"""
