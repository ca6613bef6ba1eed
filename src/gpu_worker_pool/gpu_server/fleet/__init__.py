"""What a server does as a host of a fleet: loaded only where it is one."""
