"""Where in the user's program a call is made: module path, functions, file and line; and warnings that say it there.

It is read off the Python stack of eager code (python_stack), what Dynamo and torch.export noted beside a graph's node
(graph_nodes), and a running script (there, too); off the graph of a script by frontends/scripts (places, callers).
"""
