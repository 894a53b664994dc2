"""`nc.repair`: the smallest rules under which a model runs, stays finite, and is as precise as asked."""
