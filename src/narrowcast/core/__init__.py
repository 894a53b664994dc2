"""The core, without torch: the decision, the policies and op facts it is made from, the records of casts."""
