"""For all tests: how long something takes is measured in `bench/`, and never makes a test fail on a busy machine."""

from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
