"""The observer of a run: notified of every call, forward, backward and recomputed, each with its identity."""
