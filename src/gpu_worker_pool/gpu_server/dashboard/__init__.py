"""The live page, `GET /dashboard`: it shows the GPUs and leases of this host and its peers."""
