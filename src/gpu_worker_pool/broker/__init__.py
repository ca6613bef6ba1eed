"""The broker grants leases of this host's GPUs: it joins the ledger and the readings, for a server and `local://`."""
