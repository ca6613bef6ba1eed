"""Where leases of this host's GPUs are given: the ledger and the readings together, for a server and for `local://`."""
