"""Programs to read and to run; `config_examples` may be imported, too."""
