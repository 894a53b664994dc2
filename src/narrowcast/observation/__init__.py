"""Runs observed: who a call is and what it reads and gives; runs repeated from the same state; statistics."""
