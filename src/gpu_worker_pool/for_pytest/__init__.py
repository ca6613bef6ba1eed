"""What the pytest plugin loads once a test asks for a GPU."""
