"""Devices sharded over the actors of a Ray cluster, on the virtual clock of `simulate`."""
