"""What is seen of endpoints, and ended there: the same bodies whether over HTTP or of this host."""
