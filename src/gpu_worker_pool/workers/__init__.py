"""Worker processes that hold a GPU each: the executor, its lease process, and the workers themselves."""
