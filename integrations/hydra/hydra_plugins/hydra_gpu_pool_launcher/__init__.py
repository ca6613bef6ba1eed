"""Hydra's launcher `gpu_pool`: the jobs of a multirun in worker processes with a GPU each."""
