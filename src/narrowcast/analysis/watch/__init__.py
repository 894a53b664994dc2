"""`nc.watch`: who made a value that is not finite."""
