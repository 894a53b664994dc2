"""Which regions are open, with which policy and which rules: what every front end asks."""
