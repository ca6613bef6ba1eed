"""Reads this host's GPUs: readers of the driver, and samples that all processes of the host share.

It knows nothing about HTTP, leases or waiting workers. Servers use it, and programs without a server.
"""
