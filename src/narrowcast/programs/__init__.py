"""Programs, without torch: a graph as data, the passes that edit it, the placement of formats in it."""
