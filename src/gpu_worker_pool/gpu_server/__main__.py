"""`python -m gpu_worker_pool.gpu_server`: serve, as the environment and `.env` say."""

from gpu_worker_pool.gpu_server.serving import serve
from gpu_worker_pool.gpu_server.settings import ServerSettings

if __name__ == "__main__":
    # The application reads them again, in a process of its own perhaps, and says what is wrong with them.
    serve(ServerSettings.from_environment(complain=lambda _: None))
