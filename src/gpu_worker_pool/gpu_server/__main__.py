"""`python -m gpu_worker_pool.gpu_server`: starts the server with settings from the environment and `.env`."""

import sys

from gpu_worker_pool.gpu_server.serving import serve
from gpu_worker_pool.gpu_server.settings import ServerSettings

if __name__ == "__main__":
    # The application reads the settings again, perhaps in another process, and logs what is wrong with them.
    try:
        serve(ServerSettings.from_environment(complain=lambda _: None))
    except OSError as error:
        sys.exit(f"the server cannot start: {error}")
