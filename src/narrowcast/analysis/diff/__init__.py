"""Two runs that need not be alike, compared as data: which calls are the same ones, and which make a difference."""
