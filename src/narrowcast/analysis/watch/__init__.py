"""`nc.watch`: what made a value that is not finite."""
