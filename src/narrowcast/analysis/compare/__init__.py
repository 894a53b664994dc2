"""`nc.compare`: a model under a policy against a reference: which op adds which error, and is it round-off?"""
