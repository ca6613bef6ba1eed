"""`gpu-pool demo`: a pool at work, shown as it happens."""
