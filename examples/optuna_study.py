"""An Optuna study whose trials have a GPU each: `pip install optuna` first."""

import optuna

from gpu_worker_pool import GPUProcessPoolExecutor


def train(rate: float) -> float:
    return (rate - 0.1) ** 2  # in a process that has a GPU


def main() -> None:
    with GPUProcessPoolExecutor(retries=1) as pool:

        def objective(trial: optuna.Trial) -> float:
            return pool.submit(train, trial.suggest_float("rate", 1e-4, 1.0, log=True)).result()

        study = optuna.create_study()
        study.optimize(objective, n_trials=20, n_jobs=4)
    print(study.best_params)


if __name__ == "__main__":
    main()
