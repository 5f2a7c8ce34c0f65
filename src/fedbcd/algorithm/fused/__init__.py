"""Whole sessions of a device in compiled code, for models that are chains of linear layers;
`chain.c` says what it saves.

An extra, never a need: where the library was not built (no C compiler when the package was
installed), or the model is of another kind, devices train by torch's operations. It rounds
otherwise than they do; what it gives for a device depends on that device alone, not on who else is
trained, nor on threads.
"""
