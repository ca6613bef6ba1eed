"""Share GPUs without running a cluster."""
