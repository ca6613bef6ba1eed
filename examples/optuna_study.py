"""An Optuna study whose trials have a GPU each: `pip install optuna` first."""

import optuna

from gpu_worker_pool import GPUProcessPoolExecutor


def train(rate: float) -> float:
    return (rate - 0.1) ** 2  # in a process that has a GPU


if __name__ == "__main__":
    study = optuna.create_study()
    with GPUProcessPoolExecutor(retries=1) as pool:
        study.optimize(lambda t: pool.submit(train, t.suggest_float("rate", 0, 1)).result(), n_trials=20, n_jobs=4)
