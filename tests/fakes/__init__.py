"""Stand-ins for hardware that a test host does not have."""
