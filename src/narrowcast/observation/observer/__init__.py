"""The observer of a run: told of every call, forward, backward and recomputed, each with its identity."""
