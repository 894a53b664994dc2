"""Which regions are open, with which policy, and where in the user's program we are: what every front end asks."""
