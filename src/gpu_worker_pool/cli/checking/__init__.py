"""`doctor` and `config`: what is wrong here, and what every setting is."""
