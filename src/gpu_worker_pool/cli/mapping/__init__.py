"""`map`: many commands on the GPUs there are; the front process runs them, the lease process holds their leases."""
