"""`python -m gpu_worker_pool`: the command line, for those whose PATH does not have `gpu-pool`."""

from gpu_worker_pool.cli import main

if __name__ == "__main__":
    main()
