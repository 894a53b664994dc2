"""`nc.capture`: what a run computes, call by call, as data."""
