"""Who works when: a virtual clock, delays, and rounds from events or as arrays. No tensors."""
