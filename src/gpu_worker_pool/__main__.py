"""`python -m gpu_worker_pool`: the command line, if `gpu-pool` is not in PATH."""

from gpu_worker_pool.cli import main

if __name__ == "__main__":
    main()
