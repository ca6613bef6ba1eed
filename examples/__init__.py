"""Example programs; `config_examples` can also be imported."""
