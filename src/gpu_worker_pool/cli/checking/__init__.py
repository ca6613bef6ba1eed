"""The checks of `gpu-pool doctor`, and the list of `gpu-pool config`."""
