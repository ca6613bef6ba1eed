"""Programs to read and to run; `config_examples` can also be imported."""
