"""Example configurations, and a validator that knows the usual mistakes.

    $ python examples/config_examples.py                      # the three files beside this one
    $ python examples/config_examples.py my.env               # check your own file

With GPU_SERVICE_ENDPOINT or GPU_STATS_SERVICE_ENDPOINTS set, each configuration is also tried: it prints how many GPUs
would be available now.
"""

# ruff: noqa: T201  # an example prints

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, TypeVar
from urllib.parse import urlsplit

from dotenv import dotenv_values

from gpu_worker_pool import GPUWorkerPoolClient
from gpu_worker_pool.config import (
    parse_endpoint,
    validate_load_balancing_strategy,
    validate_max_retries,
    validate_polling_interval,
    validate_threshold,
    validate_timeout,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")
V = TypeVar("V")

HERE = Path(__file__).parent
FILES = [HERE / f"{name}.env" for name in ("conservative", "balanced", "aggressive")]
#: The variables of the client, with their types.
VARIABLES: dict[str, Callable[[str], object]] = {
    "GPU_SERVICE_ENDPOINT": str,
    "GPU_STATS_SERVICE_ENDPOINTS": str,
    "GPU_SERVICE_ENDPOINTS": str,
    "GPU_LOAD_BALANCING_STRATEGY": str,
    "GPU_MEMORY_THRESHOLD_PERCENT": float,
    "GPU_UTILIZATION_THRESHOLD_PERCENT": float,
    "GPU_POLLING_INTERVAL": float,
    "GPU_ENDPOINT_TIMEOUT": float,
    "GPU_ENDPOINT_MAX_RETRIES": int,
    "GPU_ENDPOINT_HEALTH_CHECK_INTERVAL": float,
}


class Result(TypedDict):
    """`errors`: the client would refuse it. `warnings`: it would accept it, but it is probably a mistake."""

    valid: bool
    errors: list[str]
    warnings: list[str]


class ConfigurationValidator:
    """Checks values before a client uses them. It connects to nothing."""

    def validate_thresholds(self, memory: object, utilization: object) -> Result:
        errors: list[str] = []
        warnings: list[str] = []
        first = self._threshold(memory, "memory threshold", errors, warnings)
        second = self._threshold(utilization, "utilization threshold", errors, warnings)
        if first is not None and second is not None and first > second:
            warnings.append(
                f"the memory threshold {first:g} is above the utilization threshold {second:g}: are they swapped? "
                "Missing memory fails a job, a busy GPU only slows it down"
            )
        return _result(errors, warnings)

    def validate_service_endpoint(self, url: object) -> Result:
        """One URL, or `name=URL`."""
        if not isinstance(url, str):
            return _result([f"a URL is a string such as 'http://gpu-server:8000', not {url!r}"], [])
        errors: list[str] = []
        warnings: list[str] = []
        text = url.strip()
        if text != url:
            warnings.append("remove the blanks around it: the client ignores them, but other programs may not")
        if "," in text:
            errors.append("several URLs belong in service_endpoints or GPU_STATS_SERVICE_ENDPOINTS")
            return _result(errors, warnings)
        endpoint = _checked(parse_endpoint, text, "the URL", errors)
        if endpoint is None:
            if text[:1] in "'\"" and text:
                errors.append("remove the quotes: they are part of the value")
            elif "://" not in text and not text.startswith("/"):
                errors.append(f"the scheme is missing: did you mean http://{text}?")
            return _result(errors, warnings)
        parts = urlsplit(endpoint.url)
        if parts.hostname in ("0.0.0.0", "::"):  # noqa: S104  # perhaps copied from the server's HOST
            warnings.append(f"{parts.hostname} is an address to listen on; use the name of the host")
        if parts.port == 8080:
            warnings.append("a GPU server listens on port 8000 unless its PORT says otherwise")
        elif parts.port is None and parts.scheme == "http":
            warnings.append(f"without a port it is port 80, and a GPU server listens on 8000: {endpoint.url}:8000?")
        if parts.path.endswith(("/gpu/summary", "/gpu/stats", "/gpu/count", "/health")):
            warnings.append("leave the route out: the client adds /gpu/summary itself")
        return _result(errors, warnings)

    def validate_service_endpoints(self, urls: str) -> Result:
        """Several, separated by commas."""
        entries = [entry for entry in urls.split(",") if entry.strip()]
        errors = [] if entries else ["name at least one URL"]
        warnings: list[str] = []
        for entry in entries:
            one = self.validate_service_endpoint(entry.strip())
            errors += [f"{entry.strip()}: {error}" for error in one["errors"]]
            warnings += [f"{entry.strip()}: {warning}" for warning in one["warnings"]]
        if any(":8000;" in entry or " http" in entry.strip() for entry in entries):
            errors.append("URLs are separated by commas, not by blanks or semicolons")
        return _result(errors, warnings)

    def validate_polling_interval(self, seconds: object) -> Result:
        errors: list[str] = []
        warnings: list[str] = []
        interval = _checked(validate_polling_interval, seconds, "the polling interval", errors)
        if interval is not None and interval < 1:
            warnings.append("a server reads its GPUs once per second unless its REFRESH_INTERVAL says otherwise")
        if interval is not None and interval > 60:
            warnings.append(f"{interval:g} s is a long interval; did you mean milliseconds?")
        return _result(errors, warnings)

    def validate_environment(self, environ: Mapping[str, str]) -> Result:
        """All variables of the client, and those that look like misspelt ones."""
        values: dict[str, object] = {}
        for name, convert in VARIABLES.items():
            if text := environ.get(name, "").strip():
                try:
                    values[name] = convert(text)
                except ValueError:
                    values[name] = text  # the validator gives the better error
        results = [
            self.validate_thresholds(
                values.get("GPU_MEMORY_THRESHOLD_PERCENT", 80.0), values.get("GPU_UTILIZATION_THRESHOLD_PERCENT", 90.0)
            ),
            self.validate_polling_interval(values.get("GPU_POLLING_INTERVAL", 5)),
        ]
        if "GPU_SERVICE_ENDPOINT" in values:
            results.append(self.validate_service_endpoint(values["GPU_SERVICE_ENDPOINT"]))
        names = ("GPU_STATS_SERVICE_ENDPOINTS", "GPU_SERVICE_ENDPOINTS")
        lists = [str(values[name]) for name in names if name in values]
        results += map(self.validate_service_endpoints, lists)
        errors = [error for result in results for error in result["errors"]]
        warnings = [warning for result in results for warning in result["warnings"]]
        if lists and "GPU_SERVICE_ENDPOINT" in values:
            warnings.append("GPU_SERVICE_ENDPOINT has no effect beside a list of endpoints")
        checks: dict[str, Callable[[object, str], object]] = {
            "GPU_LOAD_BALANCING_STRATEGY": validate_load_balancing_strategy,
            "GPU_ENDPOINT_TIMEOUT": validate_timeout,
            "GPU_ENDPOINT_MAX_RETRIES": validate_max_retries,
            "GPU_ENDPOINT_HEALTH_CHECK_INTERVAL": validate_timeout,
        }
        for name, validate in checks.items():
            if name in values:
                _checked(validate, values[name], name, errors)
        # GPU_BACKEND belongs to the server, GPU_POOL_… to both.
        strange = [name for name in environ if name.startswith("GPU_") and name not in VARIABLES]
        warnings += [
            f"{name} is not a variable of the client; is it misspelt?"
            for name in strange
            if name != "GPU_BACKEND" and not name.startswith("GPU_POOL_")
        ]
        return _result(errors, warnings)

    @staticmethod
    def _threshold(value: object, name: str, errors: list[str], warnings: list[str]) -> float | None:
        if isinstance(value, str):
            errors.append(f"the {name} must be a number, not the text {value!r}")
            return None
        threshold = _checked(validate_threshold, value, f"the {name}", errors)
        if threshold is None:
            return None
        if 0 < threshold <= 1:
            warnings.append(f"the {name} is in percent: did you mean {100 * threshold:g}, not {threshold:g}?")
        elif threshold == 0:
            warnings.append(f"with a {name} of 0 no GPU is ever available: it must be strictly below")
        elif threshold > 95:
            warnings.append(f"with a {name} of {threshold:g} GPUs without free room are handed out")
        return threshold


def _checked(validate: Callable[[V, str], T], value: V, name: str, errors: list[str]) -> T | None:
    """The validated value; None, and an error in the list, if it is refused."""
    try:
        return validate(value, name)
    except ValueError as error:
        errors.append(str(error))
        return None


def _result(errors: list[str], warnings: list[str]) -> Result:
    return {"valid": not errors, "errors": errors, "warnings": warnings}


def read_file(path: Path) -> dict[str, str]:
    return {name: value for name, value in dotenv_values(path).items() if value is not None}


def endpoints_of(environ: Mapping[str, str]) -> dict[str, str]:
    names = ("GPU_SERVICE_ENDPOINT", "GPU_STATS_SERVICE_ENDPOINTS", "GPU_SERVICE_ENDPOINTS")
    return {name: environ[name] for name in names if environ.get(name)}


async def try_out(settings: Mapping[str, str]) -> None:
    async with GPUWorkerPoolClient(environ=settings) as client:
        status = client.get_pool_status()
        health = client.get_health()
        print(f"  {status.available_gpus} of {status.total_gpus} GPUs would be available now")
        for endpoint_id, error in health["errors"].items():
            print(f"  {endpoint_id} does not answer: {error}")


async def main(paths: list[Path]) -> int:
    validator = ConfigurationValidator()
    status = 0
    for path in paths:
        settings = read_file(path)
        print(f"{path.name}: {', '.join(f'{name}={value}' for name, value in settings.items())}")
        result = validator.validate_environment(settings)
        print("  valid" if result["valid"] else "  not valid")
        for problem in result["errors"] + result["warnings"]:
            print(f"  {problem}")
        status = status if result["valid"] else 1
        # The file overrides the environment.
        if endpoints := endpoints_of(settings) or endpoints_of(os.environ):
            await try_out({**endpoints, **settings})
    return status


if __name__ == "__main__":
    sys.exit(asyncio.run(main([Path(argument) for argument in sys.argv[1:]] or FILES)))
