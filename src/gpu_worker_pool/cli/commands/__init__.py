"""One file a command. They are imported when they are called: `gpu-pool --help` waits for none of them."""
